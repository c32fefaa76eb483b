"""The response cache: answers that stay valid for later steps, each under a number, its bit.

The coordinator never gives a bit twice in a process set, so that a late message about an evicted
bit is recognised. Every member remembers the answer and its own request. This module never sends,
sleeps or reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from hvdlite.common.base.bitsets import NO_NUMBERS, NumberSet
from hvdlite.common.decisions.request_readiness import RanksByRequest
from hvdlite.common.requests.messages import Request, Response

NAMES_PER_LINE = 8  # Names outside of a full cache whose use is recorded, for each line in it.


@dataclass
class Line:
    """A cached answer."""

    response: Response
    request: Request | None  # The request of this rank; None if the rank had joined.


class ResponseCache:
    """The answers that one rank remembers in one process set."""

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}
        self._bits: dict[str, int] = {}
        # The number of evictions that this rank has executed: its join reports it.
        self.evictions = 0

    def find(self, request: Request) -> int | None:
        """Return the bit under which exactly this request was answered, or None."""
        bit = self._bits.get(request.name)
        if bit is None:
            return None
        known = self._lines[bit].request
        return bit if known is request or known == request else None

    def remember(self, response: Response, request: Request | None) -> None:
        """Store an answer under its bit, in place of an older answer for the name."""
        old = self._bits.get(response.request.name)
        if old is not None:
            del self._lines[old]
        self._bits[response.request.name] = response.bit
        self._lines[response.bit] = Line(response, request)

    def recall(self, bit: int) -> Line:
        """Return the answer under a bit. Raises `KeyError`."""
        return self._lines[bit]

    def forget(self, bit: int) -> str:
        """Execute an eviction; return the name of its tensor, or '' if the bit was unknown."""
        self.evictions += 1
        line = self._lines.pop(bit, None)
        if line is None:
            return ""
        del self._bits[line.response.request.name]
        return line.response.request.name


class CoordinatorCache:
    """The cache of the coordinator for one process set: answers and the requests of the members.

    A full cache admits a tensor only when its least recently used line has been idle for twice as
    long as the time between the last two requests for the tensor. Plain LRU would keep nothing of a
    step with more tensors than lines: each would be evicted just before it is needed again. Time is
    counted in answers (the idea is that of LIRS: Jiang and Zhang, SIGMETRICS 2002).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # By bit, least recently used first.
        self._lines: OrderedDict[int, tuple[Response, RanksByRequest]] = OrderedDict()
        self._bits: dict[str, int] = {}
        self._grouped: dict[tuple[str, int], NumberSet] = {}  # (group, size) -> its bits.
        self._next = 0  # The next bit that is given.
        self._known = NO_NUMBERS  # The bits in use.
        self._now = 0  # The number of answers until now.
        self._used: dict[int, int] = {}  # When each bit was used last.
        # When tensors that were not admitted were requested last, least recently first.
        self._missed: OrderedDict[str, int] = OrderedDict()

    def known(self, bits: NumberSet) -> NumberSet:
        return bits & self._known

    def find(self, name: str) -> int | None:
        """Return the bit of a tensor, or None."""
        return self._bits.get(name)

    def use(self, bit: int) -> Response:
        """Return the answer under a bit, and mark it as used now."""
        self._lines.move_to_end(bit)
        self._now += 1
        self._used[bit] = self._now
        return self._lines[bit][0]

    def peek(self, bit: int) -> tuple[Response, RanksByRequest]:
        """Return the answer and the requests under a bit, without marking it as used."""
        return self._lines[bit]

    def groups(self, bits: NumberSet) -> list[NumberSet]:
        """Return those of `bits` that belong to groups, one set for each group."""
        if not self._grouped:
            return []
        group_bits = (bits & group for group in self._grouped.values())
        return [present for present in group_bits if present]

    def remember(self, response: Response, requests: RanksByRequest) -> Response:
        """Return the answer with a new bit, or unchanged if the cache does not admit it."""
        self._now += 1
        if self.capacity == 0 or not self._admits(response.request.name):
            return response
        bit = self._next
        self._next += 1
        cached = response._replace(bit=bit)
        self._lines[bit] = (cached, requests)
        self._used[bit] = self._now
        self._bits[response.request.name] = bit
        bit_set = NumberSet.of((bit,))
        self._known |= bit_set
        if response.request.group:
            group = _group(response.request)
            self._grouped[group] = self._grouped.get(group, NO_NUMBERS) | bit_set
        return cached

    def _admits(self, name: str) -> bool:
        """Return whether there is room for a tensor, or its use is likelier than the oldest's."""
        if len(self._lines) < self.capacity:
            return True
        requested = self._missed.pop(name, self._now)
        oldest = self._used[next(iter(self._lines))]
        if requested < self._now and self._now - oldest > 2 * (self._now - requested):
            return True
        self._missed[name] = self._now
        if len(self._missed) > NAMES_PER_LINE * self.capacity:
            self._missed.popitem(last=False)
        return False

    def forget(self, bit: int) -> None:
        request = self._lines.pop(bit)[0].request
        del self._used[bit]
        del self._bits[request.name]
        bit_set = NumberSet.of((bit,))
        self._known -= bit_set
        if request.group:
            group = _group(request)
            self._grouped[group] -= bit_set
            if not self._grouped[group]:
                del self._grouped[group]

    def overflow(self) -> list[int]:
        """Return the bits beyond the capacity, least recently used first."""
        excess = len(self._lines) - self.capacity
        return [bit for bit, _ in zip(self._lines, range(max(excess, 0)), strict=False)]


def _group(request: Request) -> tuple[str, int]:
    return request.group, request.group_size
