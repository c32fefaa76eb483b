"""Control messages as frames that fit into one packet of a socket, and their reassembly.

A frame is a header and a part of one message; the frames of a message follow each other. This
module never sends.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from hvdlite.common.base.errors import ProtocolError

MAGIC = 0x68564C31  # "hVL1"
HEADER = struct.Struct("<IIQ")  # MAGIC, bytes in this frame, bytes left of the message with it.
FRAME_BYTES = 64 << 10  # A frame with its header: half of the smallest socket buffer.
MESSAGE_BYTES = 1 << 30  # The longest control message.


def frames(body: bytes) -> Iterator[bytes]:
    """Yield the frames of one message; an empty message is one frame."""
    check_length(body)
    room = FRAME_BYTES - HEADER.size
    for start in range(0, len(body) or 1, room):
        part = body[start : start + room]
        yield HEADER.pack(MAGIC, len(part), len(body) - start) + part


def check_length(body: bytes) -> None:
    """Raise `ProtocolError` for a message that is too long."""
    if len(body) > MESSAGE_BYTES:
        raise ProtocolError(f"a control message of {len(body)} bytes is too long to send")


class Assembler:
    """Assembles the messages of `rank` from their frames."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._body = bytearray()
        self._missing = 0  # Bytes of the current message that have not arrived.

    def add(self, frame: bytes) -> bytes | None:
        """Return the message that `frame` completes, or None if more frames must follow.

        Raises `ProtocolError` for a frame that `frames` cannot have made.
        """
        if len(frame) < HEADER.size:
            raise self._broken(f"a frame of {len(frame)} bytes")
        magic, length, missing = HEADER.unpack_from(frame)
        if magic != MAGIC:
            raise self._broken(f"a frame that begins with {magic:#x}")
        if length != len(frame) - HEADER.size or not length <= missing <= MESSAGE_BYTES:
            raise self._broken(f"a frame of {len(frame)} bytes that announces {length}/{missing}")
        if self._missing not in (0, missing):
            raise self._broken(
                f"a frame out of order: {missing} bytes to come, not {self._missing}"
            )
        if length == 0 and missing:
            raise self._broken("an empty frame of a longer message")
        self._body += frame[HEADER.size :]
        self._missing = missing - length
        if self._missing:
            return None
        body, self._body = bytes(self._body), bytearray()
        return body

    def _broken(self, defect: str) -> ProtocolError:
        text = f"rank {self._rank} sent {defect}: is that another program?"
        return ProtocolError(text, self._rank)
