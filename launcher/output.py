"""What the ranks print: whole lines with the rank before them, and a file for each rank."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO

from hvdlite.common.base.errors import ConfigError

STREAMS = ("stdout", "stderr")
LONGEST_LINE_BYTES = 1 << 20  # a longer one is printed in parts


class Output:
    """Prints for all ranks, on this process's own standard output and error."""

    def __init__(self, num_proc: int, directory: str | None, timestamps: bool) -> None:
        self.timestamps = timestamps
        self._rest: dict[tuple[int, str], bytes] = {}
        self._ended_with: dict[tuple[int, str], bytes] = {}
        self._files: dict[tuple[int, str], BinaryIO] = {}
        if directory is not None:
            self._open_files(Path(directory), num_proc)

    def _open_files(self, directory: Path, num_proc: int) -> None:
        width = len(str(num_proc - 1))
        try:
            for rank in range(num_proc):
                folder = directory / f"rank.{rank:0{width}}"
                folder.mkdir(parents=True, exist_ok=True)
                for stream in STREAMS:
                    self._files[rank, stream] = (folder / stream).open("wb", buffering=0)
        except OSError as error:
            self.close()
            raise ConfigError(f"--output-filename: cannot write there: {error}") from None

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take in what `rank` has written to `stream`; raises BrokenPipeError."""
        key = (rank, stream)
        if key in self._files:
            self._files[key].write(data)
        data = self._rest.pop(key, b"") + data
        pieces = data.splitlines(keepends=True)  # a progress bar ends its lines with \r
        if pieces and not pieces[-1].endswith((b"\r", b"\n")):
            rest = pieces.pop()
            if len(rest) > LONGEST_LINE_BYTES:
                pieces.append(rest + b"\n")
            else:
                self._rest[key] = rest
        prefix = self._prefix(rank, stream)
        text = b""
        for piece in pieces:
            # The other half of \r\n is no line of its own.
            half = piece == b"\n" and self._ended_with.get(key) == b"\r"
            text += piece if half else prefix + piece
            self._ended_with[key] = piece[-1:]
        self.write(stream, text)

    def _prefix(self, rank: int, stream: str) -> bytes:
        now = time.ctime() if self.timestamps else ""
        return f"{now}[{rank}]<{stream}>:".encode()

    def finish(self) -> None:
        """Print the lines that were never ended."""
        for (rank, stream), rest in list(self._rest.items()):
            self.write(stream, self._prefix(rank, stream) + rest + b"\n")
        self._rest.clear()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    @staticmethod
    def write(stream: str, text: bytes) -> None:
        """Write to this process's own stream, as it is; a notebook's has no bytes."""
        if not text:
            return
        target = sys.stdout if stream == "stdout" else sys.stderr
        if hasattr(target, "buffer"):
            target.buffer.write(text)
        else:
            target.write(text.decode(errors="replace"))
        target.flush()
