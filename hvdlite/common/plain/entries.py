"""What a rank has enqueued, and what observers are told of a segment that has run."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hvdlite.common.plain.handles import Handle
from hvdlite.common.plain.messages import NO_BIT, Request, Response

Array = NDArray[Any]


class Entry:
    """Something that was enqueued on this rank; those with a tensor override the data methods."""

    splits: tuple[int, ...] = ()
    received_splits: tuple[int, ...] = ()
    size_bytes = 0  # of the input
    enqueued = 0.0  # seconds of `time.monotonic`; known while there are observers
    response: Response  # set before it is run

    def __init__(self, request: Request) -> None:
        self.request = request
        self.handle = Handle()
        self.sent_bit = NO_BIT  # reported under this bit; NO_BIT: in full, or not yet

    def wait(self) -> None:
        """Sleep until the input may be read."""

    @property
    def input(self) -> Array:
        """The input, flat."""
        raise TypeError(f"{self.request.collective} has no tensor")

    def output(self, shape: tuple[int, ...]) -> Array:
        """The output of this shape, flat."""
        raise TypeError(f"{self.request.collective} has no tensor")

    def complete(self, value: Any = None) -> None:
        """It has run."""
        self.handle.complete(value)


_GRADIENT_PARTS = {  # how names of gradients end besides, by the collective that carries them
    "allreduce": re.compile(r"_\d+of\d+$"),  # of a group
    "allgather": re.compile(r"\.(indices|values)$"),  # of a sparse gradient
}


class SegmentRun(NamedTuple):
    """One reduction, or other collective, that has run: what travelled together, and when."""

    names: tuple[str, ...]
    collective: str
    bytes: int  # of this rank's inputs
    start: float  # seconds of `time.monotonic`
    end: float
    members: tuple[int, ...] = ()  # the ranks that took part
    ready: float = 0.0  # this rank had enqueued the last of them; 0: before anybody watched

    def gradient_of(self, names: Container[str]) -> str | None:
        """The first that is one of `names`, which are those of gradients; None: none of them is.

        Gradients are reduced, and those that are sparse have their parts gathered. Anything else
        may have the name of a gradient too, such as the broadcast of its parameter.
        """
        part = _GRADIENT_PARTS.get(self.collective)
        if part is None:
            return None
        for name in self.names:
            own = name.partition(".")[2]  # without the collective
            if self.collective == "allreduce" and own in names:
                return own
            whole, parts = part.subn("", own)
            if parts and whole in names:
                return whole
        return None


Observer = Callable[[SegmentRun], None]
