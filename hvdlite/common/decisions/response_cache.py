"""What was negotiated once, under a bit. This module never sends, sleeps or reads a clock.

The coordinator numbers the bits of a process set and never uses a number twice, so that a message
about a forgotten bit is recognised as late. Every member remembers the answer and its own request.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from hvdlite.common.base.bitsets import NO_NUMBERS, NumberSet
from hvdlite.common.decisions.request_readiness import Alike
from hvdlite.common.plain.messages import Request, Response

NAMES_PER_LINE = 8  # names that are watched, though they are not in a full cache


@dataclass
class Line:
    """A remembered answer, with the request of this rank that led to it (None: it had joined)."""

    response: Response
    request: Request | None


class ResponseCache:
    """One rank's memory of the answers in one process set."""

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}
        self._bits: dict[str, int] = {}
        self.evictions = 0  # how many orders to forget a bit were obeyed

    def find(self, request: Request) -> int | None:
        """The bit under which exactly this request was answered."""
        bit = self._bits.get(request.name)
        if bit is None or self._lines[bit].request != request:
            return None
        return bit

    def remember(self, response: Response, request: Request | None) -> None:
        """Keep an answer under its bit."""
        old = self._bits.get(response.request.name)
        if old is not None:
            del self._lines[old]
        self._bits[response.request.name] = response.bit
        self._lines[response.bit] = Line(response, request)

    def recall(self, bit: int) -> Line:
        """What is remembered under a bit. Raises `KeyError`."""
        return self._lines[bit]

    def forget(self, bit: int) -> str:
        """Obey an eviction; the name of its tensor, or '' where it was unknown."""
        self.evictions += 1
        line = self._lines.pop(bit, None)
        if line is None:
            return ""
        del self._bits[line.response.request.name]
        return line.response.request.name


class CoordinatorCache:
    """The coordinator's side: the members' requests and the answer, least recently used first.

    A full cache takes in a tensor only when its oldest line has been idle for twice as long as the
    time between the last two requests for the tensor. To always drop the oldest would remember
    nothing of a step with more tensors than lines: each would be dropped just before it is needed.
    Time is counted in answers (the idea is that of LIRS, Jiang and Zhang, SIGMETRICS 2002).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lines: OrderedDict[int, tuple[Response, Alike]] = OrderedDict()
        self._bits: dict[str, int] = {}
        self._grouped: dict[tuple[str, int], NumberSet] = {}  # group, with its size -> its bits
        self._next = 0
        self._known = NO_NUMBERS  # the bits in use
        self._now = 0  # answers until now
        self._used: dict[int, int] = {}  # when each bit was used last
        self._missed: OrderedDict[str, int] = OrderedDict()  # not taken in: when asked for last

    def known(self, bits: NumberSet) -> NumberSet:
        """Those of `bits` that are remembered."""
        return bits & self._known

    def find(self, name: str) -> int | None:
        """The bit of a tensor."""
        return self._bits.get(name)

    def use(self, bit: int) -> Response:
        """The answer under a bit, which counts as used now."""
        self._lines.move_to_end(bit)
        self._now += 1
        self._used[bit] = self._now
        return self._lines[bit][0]

    def peek(self, bit: int) -> tuple[Response, Alike]:
        """The answer and the requests under a bit."""
        return self._lines[bit]

    def groups(self, bits: NumberSet) -> list[NumberSet]:
        """Those of `bits` that belong to groups, one set for each group."""
        if not self._grouped:
            return []
        own = (bits & group for group in self._grouped.values())
        return [each for each in own if each]

    def remember(self, response: Response, requests: Alike) -> Response:
        """Give the answer a bit, which the returned answer carries; none if it is not kept."""
        self._now += 1
        if self.capacity == 0 or not self._is_kept(response.request.name):
            return response
        bit = self._next
        self._next += 1
        numbered = response._replace(bit=bit)
        self._lines[bit] = (numbered, requests)
        self._used[bit] = self._now
        self._bits[response.request.name] = bit
        own = NumberSet.of((bit,))
        self._known |= own
        if response.request.group:
            group = _group(response.request)
            self._grouped[group] = self._grouped.get(group, NO_NUMBERS) | own
        return numbered

    def _is_kept(self, name: str) -> bool:
        """Return whether there is room for a tensor, or its use is likelier than the oldest's."""
        if len(self._lines) < self.capacity:
            return True
        asked = self._missed.pop(name, self._now)
        oldest = self._used[next(iter(self._lines))]
        if asked < self._now and self._now - oldest > 2 * (self._now - asked):
            return True
        self._missed[name] = self._now
        if len(self._missed) > NAMES_PER_LINE * self.capacity:
            self._missed.popitem(last=False)
        return False

    def forget(self, bit: int) -> None:
        """Forget a bit."""
        request = self._lines.pop(bit)[0].request
        del self._used[bit]
        del self._bits[request.name]
        own = NumberSet.of((bit,))
        self._known -= own
        if request.group:
            group = _group(request)
            self._grouped[group] -= own
            if not self._grouped[group]:
                del self._grouped[group]

    def overflow(self) -> list[int]:
        """The bits beyond the capacity, least recently used first."""
        excess = len(self._lines) - self.capacity
        return [bit for bit, _ in zip(self._lines, range(max(excess, 0)), strict=False)]


def _group(request: Request) -> tuple[str, int]:
    return request.group, request.group_size
