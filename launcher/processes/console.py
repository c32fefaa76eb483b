"""Standard output and error of this process, whatever they are connected to.

A pipe may be non-blocking (as CI runners make it), full, or closed; a disk may be full; a notebook
has no file descriptors. Output that cannot be written is no reason to end a training job.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

LOOK_MILLISECONDS = 200
DRAW_SECONDS = 0.1
COLUMNS, LINES = 80, 24  # where a terminal does not know its size
ERASE = b"\r\x1b[K"


class Console:
    """Writes whole texts; `give_up` says that a reader who does not read is not waited for."""

    def __init__(self, give_up: Callable[[], bool] = lambda: False) -> None:
        self._give_up = give_up
        self._broken: set[str] = set()  # streams that nobody reads any more
        self._warned = False
        self._live: tuple[str, bytes] | None = None  # stream and text of the line that is redrawn
        self._block: tuple[str, list[bytes]] = ("stderr", [])  # The lines that stand above it.
        self._drawn_at = 0.0

    def is_terminal(self, stream: str) -> bool:
        """Return whether a person sees `stream`."""
        fd = _descriptor(stream)
        return fd is not None and os.isatty(fd)

    def write(self, stream: str, text: bytes) -> None:
        """Write `text`; raises BrokenPipeError the first time that nobody reads `stream`."""
        if not text:
            return
        self._erase_below()
        try:
            self._write(stream, text)
        finally:
            self._draw_below()

    def show(self, stream: str, lines: Sequence[str]) -> None:
        """Show lines below everything else, in the place of those before; none: nothing."""
        self._erase_below()
        self._block = (stream, [line.encode(errors="replace") for line in lines])
        self._draw_below()

    def size(self, stream: str) -> tuple[int, int]:
        """Return the columns and lines of a terminal."""
        columns, lines = os.get_terminal_size(_descriptor(stream) or 2)
        return columns or COLUMNS, lines or LINES

    def _erase_below(self) -> None:
        if self._live is not None:
            self._write(self._live[0], ERASE)
        stream, lines = self._block
        if lines:
            self._write(stream, b"\r\x1b[%dA\x1b[J" % len(lines))

    def _draw_below(self) -> None:
        stream, lines = self._block
        if lines:
            self._write(stream, b"".join(line + b"\n" for line in lines))
        if self._live is not None:
            self._write(*self._live)

    def draw(self, stream: str, text: bytes) -> None:
        """Show `text` below everything else, in the place of what was drawn before."""
        now = time.monotonic()
        if now - self._drawn_at < DRAW_SECONDS:
            return
        self._drawn_at = now
        columns, _ = self.size(stream)
        shown = text.decode(errors="replace")[: columns - 1].encode(errors="replace")
        self._live = (stream, shown)
        self._write(stream, ERASE + shown)

    def erase(self) -> None:
        """Take away what was drawn."""
        if self._live is not None:
            self._write(self._live[0], ERASE)
            self._live = None

    def _write(self, stream: str, text: bytes) -> None:
        target = _target(stream)
        if target is None or stream in self._broken:
            return
        try:
            fd = _descriptor(stream)
            if fd is not None:
                target.flush()
                self._write_descriptor(fd, text)
                return
            if hasattr(target, "buffer"):
                target.buffer.write(text)
            else:
                target.write(text.decode(errors="replace"))
            target.flush()
        except BrokenPipeError:
            self._broken.add(stream)
            raise
        except OSError as error:
            self._warn(stream, error)

    def _write_descriptor(self, fd: int, text: bytes) -> None:
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        left = memoryview(text)
        while left:
            if not poller.poll(LOOK_MILLISECONDS):
                if self._give_up():
                    return
                continue
            # A pipe that can be written takes so much at once, without blocking us.
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(fd, left[: select.PIPE_BUF]) :]

    def _warn(self, stream: str, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            other = "stderr" if stream == "stdout" else "stdout"
            text = f"hvdlite-run: cannot write to {stream}, and goes on without: {error}\n"
            with contextlib.suppress(OSError):
                self._write(other, text.encode(errors="replace"))


def say(text: str) -> None:
    """Print a line of hvdlite-run's own, where there is somebody to read it."""
    line = f"hvdlite-run: {text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        Console().write("stderr", line)


def open_missing_descriptors() -> None:
    """Open ``/dev/null`` in the place of standard streams that this process was started without.

    Otherwise the next file that is opened gets their number, and what is printed goes there.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def _target(stream: str) -> TextIO | None:
    return sys.stdout if stream == "stdout" else sys.stderr


def _descriptor(stream: str) -> int | None:
    """Return the file descriptor; None for the objects of notebooks, which have no bytes."""
    target = _target(stream)
    if target is None or not hasattr(target, "buffer"):
        return None
    try:
        return target.fileno()
    except (OSError, ValueError):
        return None
