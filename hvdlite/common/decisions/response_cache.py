"""What was negotiated once, under a bit. This module never sends, sleeps or reads a clock.

The coordinator numbers the bits of a process set and never uses a number twice, so that a message
about a forgotten bit is recognised as late. Every member remembers the answer and its own request.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from hvdlite.common.base.bitsets import NumberSet
from hvdlite.common.decisions.request_readiness import Alike
from hvdlite.common.plain.messages import Request, Response


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
        """Forget a bit; the name of its tensor, or '' where it was unknown."""
        line = self._lines.pop(bit, None)
        if line is None:
            return ""
        del self._bits[line.response.request.name]
        return line.response.request.name


class CoordinatorCache:
    """The coordinator's side: the members' requests and the answer, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lines: OrderedDict[int, tuple[Response, Alike]] = OrderedDict()
        self._bits: dict[str, int] = {}
        self._grouped: dict[tuple[str, int], NumberSet] = {}  # group, with its size -> its bits
        self._next = 0
        self._known = NumberSet({})  # the bits in use

    def known(self, bits: NumberSet) -> NumberSet:
        """Those of `bits` that are remembered."""
        return bits & self._known

    def find(self, name: str) -> int | None:
        """The bit of a tensor."""
        return self._bits.get(name)

    def use(self, bit: int) -> Response:
        """The answer under a bit, which counts as used now."""
        self._lines.move_to_end(bit)
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
        """Give the answer a bit, which the returned answer carries."""
        if self.capacity == 0:
            return response
        bit = self._next
        self._next += 1
        numbered = response._replace(bit=bit)
        self._lines[bit] = (numbered, requests)
        self._bits[response.request.name] = bit
        own = NumberSet.of((bit,))
        self._known |= own
        if response.request.group:
            group = _group(response.request)
            self._grouped[group] = self._grouped.get(group, NumberSet({})) | own
        return numbered

    def forget(self, bit: int) -> None:
        """Forget a bit."""
        request = self._lines.pop(bit)[0].request
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
