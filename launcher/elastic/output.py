"""What the workers of an elastic job print, marked with the ranks that they had at their start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.error_text import last_exception
from hvdlite.launcher.processes.output import STREAMS, Output


class ElasticOutput(Output):
    """See `Output`: what it calls a rank is a worker's number here."""

    def __init__(
        self, num_proc: int, directory: str | None, timestamps: bool, console: Console,
        note_broken_pipe: Callable[[], None],
    ) -> None:  # fmt: skip
        ranks = range(num_proc)
        super().__init__(ranks, None, timestamps, console, note_broken_pipe=note_broken_pipe)
        self._start_ranks: dict[int, int] = {}  # Of the workers that have not ended.
        self._incarnations: dict[int, int] = {}  # Start rank -> how many workers have had it.
        self._directory = Path(directory) if directory is not None else None
        self._width = len(str(num_proc - 1))
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--output-filename: cannot write there: {error}") from None

    def begin(self, number: int, start_rank: int) -> None:
        """Take note of a worker before it prints anything."""
        self._start_ranks[number] = start_rank
        incarnation = self._incarnations.get(start_rank, 0)
        self._incarnations[start_rank] = incarnation + 1
        if self._directory is None:
            return
        again = f".{incarnation}" if incarnation else ""
        folder = self._directory / f"rank.{start_rank:0{self._width}}{again}"
        try:
            folder.mkdir(exist_ok=True)
            for stream in STREAMS:
                self._files[number, stream] = (folder / stream).open("wb", buffering=0)
        except OSError as error:
            self._note_unsaved(number, error)

    def end(self, number: int) -> str | None:
        """Print what a worker has left, and forget it; return the exception that it has printed."""
        if number not in self._start_ranks:
            return None
        for stream in STREAMS:
            key = (number, stream)
            self._end_line(key)
            if key in self._files:
                self._files.pop(key).close()
        del self._start_ranks[number]
        return last_exception(self._tails.pop(number, b"")) or None

    def _label(self, rank: int) -> int:
        return self._start_ranks.get(rank, rank)
