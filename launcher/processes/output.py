"""What the ranks print: whole lines with the rank before them, and a file for each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.error_text import last_exception

STREAMS = ("stdout", "stderr")
LONGEST_LINE_BYTES = 1 << 20  # a longer one is printed in parts
TAIL_BYTES = 1 << 14  # of standard error, in which the reason of a failure is looked for
# How often a line that is being redrawn, such as a progress bar, is printed to what is no terminal.
PROGRESS_SECONDS = 10.0

Key = tuple[int, str]  # rank and stream


class Output:
    """Prints for all ranks, on this process's own standard output and error.

    A program redraws a line by ending it with ``\\r`` instead of ``\\n``. The bars of several ranks
    cannot share a terminal's line: the state that a line ends with is printed, and meanwhile a
    terminal shows the bar of the lowest rank that has one, and a file gets a state now and then.

    Processes have numbers, which are the ranks of a job that keeps its ranks. The workers of an
    elastic one are named by `begin`, and marked with the rank that they had at their start.
    """

    def __init__(
        self, ranks: Sequence[int], directory: str | None, timestamps: bool,
        console: Console | None = None, raw_rank: int | None = None,
        note_broken_pipe: Callable[[], None] | None = None, elastic: bool = False,
    ) -> None:  # fmt: skip
        self.timestamps = timestamps
        self.raw_rank = raw_rank  # what it prints is passed on as it is
        self.console = console or Console()
        # Is called when nobody reads our output any more; else BrokenPipeError is raised.
        self._note_broken_pipe = note_broken_pipe
        self._names: dict[int, str] = {}  # Of processes that are no ranks.
        self._start_ranks: dict[int, int] = {}  # Of the workers that have not ended.
        self._incarnations: dict[int, int] = {}  # Start rank -> how many workers have had it.
        self._rest: dict[Key, bytes] = {}  # the start of a line that has not ended
        self._progress_at: dict[Key, float] = {}  # when a state of the line was printed last
        self._tails: dict[int, bytes] = {}
        self._files: dict[Key, BinaryIO] = {}
        self._warned = False
        self._directory = Path(directory) if directory is not None else None
        self._width = len(str(max(ranks)))
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                for rank in () if elastic else ranks:
                    self._open_files(rank, f"rank.{rank:0{self._width}}")
            except OSError as error:
                raise self._cannot_write(error) from None

    def _open_files(self, number: int, name: str) -> None:
        assert self._directory is not None
        folder = self._directory / name
        folder.mkdir(exist_ok=True)
        for stream in STREAMS:
            self._files[number, stream] = (folder / stream).open("wb", buffering=0)

    def _cannot_write(self, error: OSError) -> ConfigError:
        self.close()
        return ConfigError(f"--output-filename: cannot write there: {error}")

    def add(self, number: int, name: str) -> None:
        """Let a process that is no rank have a name, such as "server 0", in place of a rank."""
        self._names[number] = name
        if self._directory is not None:
            try:
                self._open_files(number, name.replace(" ", "."))
            except OSError as error:
                raise self._cannot_write(error) from None

    def begin(self, number: int, start_rank: int) -> None:
        """Take note of a worker of an elastic job before it prints anything."""
        self._start_ranks[number] = start_rank
        incarnation = self._incarnations.get(start_rank, 0)
        self._incarnations[start_rank] = incarnation + 1
        if self._directory is not None:
            again = f".{incarnation}" if incarnation else ""
            try:
                self._open_files(number, f"rank.{start_rank:0{self._width}}{again}")
            except OSError as error:
                self._note_unsaved(number, error)

    def end(self, number: int) -> str | None:
        """Print what a worker has left, and forget it; return the exception that it has printed."""
        if number not in self._start_ranks:
            return None
        for stream in STREAMS:
            self._end_line((number, stream))
            if file := self._files.pop((number, stream), None):
                file.close()
        del self._start_ranks[number]
        return last_exception(self._tails.pop(number, b"")) or None

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take in what `rank` has written to `stream`; raises BrokenPipeError."""
        key = (rank, stream)
        self._save(key, data)
        if stream == "stderr":
            self._tails[rank] = (self._tails.get(rank, b"") + data)[-TAIL_BYTES:]
        if rank == self.raw_rank:
            self.write(stream, data)
            return
        *lines, rest = (self._rest.pop(key, b"") + data).split(b"\n")
        if len(rest) > LONGEST_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        if lines:
            self._end_progress(key)
            prefix = self._prefix(rank, stream)
            self.write(stream, b"".join(prefix + _last_state(line) + b"\n" for line in lines))
        rest = _forget_old_states(rest)
        if rest:
            self._rest[key] = rest
        if b"\r" in rest:
            self._show_progress(key)
        else:
            self._end_progress(key)

    def _show_progress(self, key: Key) -> None:
        """Show the state of a line that is being redrawn."""
        rank, stream = key
        state = self._prefix(rank, stream) + _last_state(self._rest[key])
        now = time.monotonic()
        if self.raw_rank is None and self.console.is_terminal(stream):
            self._progress_at[key] = now
            if key == min(self._progress_at):
                self.console.draw(stream, state)
        elif now - self._progress_at.setdefault(key, now) >= PROGRESS_SECONDS:
            self._progress_at[key] = now
            self.write(stream, state + b"\n")

    def _end_progress(self, key: Key) -> None:
        if self._progress_at.pop(key, None) is not None:
            self.console.erase()

    def _save(self, key: Key, data: bytes) -> None:
        """Write to the file of the rank and stream; where that fails, the job goes on without."""
        if key not in self._files:
            return
        left = memoryview(data)
        try:
            while left:
                left = left[self._files[key].write(left) :]
        except OSError as error:
            self._files.pop(key).close()
            self._note_unsaved(key[0], error)

    def _note_unsaved(self, rank: int, error: OSError) -> None:
        """Say once that what a rank prints cannot be written to its file."""
        if not self._warned:
            self._warned = True
            who = self._names.get(rank) or f"rank {self._start_ranks.get(rank, rank)}"
            text = f"hvdlite-run: --output-filename: {who}: {error}; the job goes on\n"
            self.write("stderr", text.encode(errors="replace"))

    def _prefix(self, rank: int, stream: str) -> bytes:
        now = time.ctime() if self.timestamps else ""
        name = self._names.get(rank) or self._start_ranks.get(rank, rank)
        return f"{now}[{name}]<{stream}>:".encode()

    def finish(self) -> None:
        """Print the lines that were never ended."""
        for key in list(self._rest):
            self._end_line(key)

    def _end_line(self, key: Key) -> None:
        rest = self._rest.pop(key, None)
        if rest is not None:
            self._end_progress(key)
            self.write(key[1], self._prefix(*key) + _last_state(rest) + b"\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def causes(self) -> dict[int, str]:
        """Return the last exception that each rank has printed, as ``Type: text``."""
        found = {rank: last_exception(tail) for rank, tail in self._tails.items()}
        return {rank: text for rank, text in found.items() if text}

    def write(self, stream: str, text: bytes) -> None:
        """Write to this process's own stream, as it is; raises BrokenPipeError."""
        try:
            self.console.write(stream, text)
        except BrokenPipeError:
            if self._note_broken_pipe is None:
                raise
            self._note_broken_pipe()


def _last_state(line: bytes) -> bytes:
    """Return what a reader of the line sees last; the ``\\r`` of a ``\\r\\n`` stays."""
    body = line.rstrip(b"\r")
    states = [state for state in body.split(b"\r") if state.strip()]
    return (states[-1] if states else b"") + (b"\r" if line.endswith(b"\r") else b"")


def _forget_old_states(rest: bytes) -> bytes:
    """Return `rest` without the states of its line that have been drawn over."""
    states = rest.split(b"\r")
    drawn = [index for index, state in enumerate(states) if state]
    if len(states) == 1 or not drawn:
        return rest
    if not states[drawn[-1]].strip():  # blanks: the program has wiped its bar away
        return b""
    start = drawn[-1]
    return (b"\r" if start else b"") + b"\r".join(states[start:])
