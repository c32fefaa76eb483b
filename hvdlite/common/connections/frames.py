"""Frames: messages with their lengths, each followed by the arrays that it announces.

    PREFIX: bytes of the head, number of arrays | the size of each array | head | array, array ...

The head is what an unpacker makes a message of, by default a msgpack array. A beat is a prefix
alone: it says nothing, and shows that its sender lives. Limits are the receiver's; nothing is
allocated for a frame that exceeds them. This module never sends.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack

from hvdlite.common.base.errors import ProtocolError

PREFIX = struct.Struct("<II")
MOST_ARRAYS = 4096
NO_MESSAGE = 0xFFFFFFFF  # For the number of arrays, in a beat.
BEAT = PREFIX.pack(0, NO_MESSAGE)

# Memory to receive from and to send; arrays of numpy are made so by `memoryview(a).cast("B")`.
Buffer = bytes | bytearray | memoryview
# Returns writable memory of exactly these sizes, in which the arrays of a message are to lie. May
# raise `ProtocolError`.
Memory = Callable[[Any, list[int]], Sequence[bytearray | memoryview]]


def pack(message: Sequence[Any]) -> bytes:
    """Return a message as a head. Texts may hold what a file name holds."""
    packed: bytes = msgpack.packb(message, unicode_errors="surrogateescape")
    return packed


def unpack(head: bytes) -> list[Any]:
    """Return the message of a head: a list that begins with its kind. Raises `ProtocolError`."""
    try:
        message = msgpack.unpackb(head, strict_map_key=False, unicode_errors="surrogateescape")
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"it sent a message that cannot be read: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ProtocolError("it sent a message that has no kind")
    return message


def frame(head: bytes, arrays: Sequence[Buffer] = ()) -> bytes:
    """Return the beginning of a frame, which its arrays follow."""
    if not arrays:
        return PREFIX.pack(len(head), 0) + head
    sizes = struct.pack(f"<{len(arrays)}Q", *(memoryview(array).nbytes for array in arrays))
    return b"".join((PREFIX.pack(len(head), len(arrays)), sizes, head))


def no_memory(message: Any, sizes: list[int]) -> Sequence[bytearray]:
    raise ProtocolError(f"it sent {len(sizes)} arrays, and none are expected")


class Frames:
    """Takes frames out of a stream of bytes; heads have at most `most_bytes`.

    A message has at most `most_arrays`.
    """

    def __init__(
        self,
        most_bytes: int,
        memory: Memory = no_memory,
        unpacker: Callable[[bytes], Any] = unpack,
        most_arrays: int = MOST_ARRAYS,
    ) -> None:
        self.most_bytes, self._most_arrays = most_bytes, most_arrays
        self._memory, self._unpacker = memory, unpacker
        self._input = bytearray()
        self._message: Any = None
        self._has_message = False
        self._arrays: Sequence[bytearray | memoryview] = ()
        # What is still to be filled of the arrays of `_message`, in order.
        self.due: list[memoryview] = []

    @property
    def between(self) -> bool:
        """Whether the stream may end here: nothing of a frame has come."""
        return not self._input and not self.due

    def add(self, data: Buffer) -> Iterator[tuple[Any, Sequence[bytearray | memoryview]]]:
        """Yield the messages that are complete with `data`, with their arrays.

        Raises `ProtocolError` for a frame that exceeds a limit, or cannot be read.
        """
        self._input += data
        while True:
            if self.due:
                if not self._input:
                    return
                count = min(len(self._input), len(self.due[0]))
                with memoryview(self._input) as view:
                    self.due[0][:count] = view[:count]
                del self._input[:count]
                self._consume(count)
            elif not self._take_head():
                return
            if self._has_message and not self.due:
                yield self._complete()

    def filled(self, count: int) -> Iterator[tuple[Any, Sequence[bytearray | memoryview]]]:
        """Yield the message whose arrays are complete after `count` more bytes in `due`."""
        while count:
            step = min(count, len(self.due[0]))
            self._consume(step)
            count -= step
        if not self.due:
            yield self._complete()

    def _consume(self, count: int) -> None:
        self.due[0] = self.due[0][count:]
        if not self.due[0]:
            del self.due[0]

    def _complete(self) -> tuple[Any, Sequence[bytearray | memoryview]]:
        message, arrays = self._message, self._arrays
        self._message, self._has_message, self._arrays = None, False, ()
        return message, arrays

    def _take_head(self) -> bool:
        """Take a head out of the input; return False where it is not complete."""
        if len(self._input) < PREFIX.size:
            return False
        length, count = PREFIX.unpack_from(self._input)
        if (length, count) == (0, NO_MESSAGE):
            del self._input[: PREFIX.size]
            return True
        if length > self.most_bytes:
            raise ProtocolError(
                f"it sent a message of {length} bytes, and {self.most_bytes} are the most"
            )
        if count > self._most_arrays or (count and self._memory is no_memory):
            raise ProtocolError(f"it sent a message with {count} arrays")
        begin = PREFIX.size + 8 * count
        if len(self._input) < begin + length:
            return False
        sizes = list(struct.unpack_from(f"<{count}Q", self._input, PREFIX.size))
        head = bytes(memoryview(self._input)[begin : begin + length])
        del self._input[: begin + length]
        self._message, self._has_message = self._unpacker(head), True
        if count:
            self._arrays = self._memory(self._message, sizes)
            views = [memoryview(array).cast("B") for array in self._arrays]
            if [view.nbytes for view in views] != sizes:
                raise ValueError(f"the memory for arrays of {sizes} bytes has other sizes")
            self.due = [view for view in views if view.nbytes]
        return True
