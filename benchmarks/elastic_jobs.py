"""Elastic jobs that benchmarks disturb: start one, read what its workers note, kill, stop, end.

Each worker appends one JSON object a line to a file of its own in the folder of the job, with the
time of the monotonic clock, about which all processes of a machine agree.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jobs import environment

HERE = Path(__file__).parent
WORKER = HERE / "elastic_worker.py"
END = "end"  # The file whose existence ends the training.
WAIT_SECONDS = 60.0
END_SECONDS = 30.0
LOOK_SECONDS = 0.002
MARK = "HVDLITE_BENCHMARK_JOB"  # A variable that every process of a job inherits.
Note = dict[str, Any]


class JobError(Exception):
    """An elastic job has ended, or has not done in time what was waited for."""


class ElasticJob:
    """A job whose workers write notes into `folder`, and whose output is in the file `log`."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self.folder, self.process, self.log = folder, process, log
        self.notes: list[Note] = []
        self._ends: dict[Path, int] = {}

    def read(self) -> list[Note]:
        """Read what the workers have written; return all notes, each worker's in order."""
        for path in sorted(self.folder.glob("*.jsonl")):
            end = self._ends.get(path, 0)
            if path.stat().st_size == end:
                continue
            with path.open("rb") as file:
                file.seek(end)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self.notes += map(json.loads, whole.splitlines())
            self._ends[path] = end + len(whole)
        return self.notes

    def wait(
        self, found: Callable[[list[Note]], Any], what: str, seconds: float = WAIT_SECONDS
    ) -> Any:
        """Return what `found` makes of the notes as soon as it is true. Raises `JobError`."""
        end = time.monotonic() + seconds
        while not (result := found(self.read())):
            if self.process.poll() is not None or time.monotonic() > end:
                raise JobError(f"{what} did not come about:\n{self.log.read_text()[-6000:]}")
            time.sleep(LOOK_SECONDS)
        return result

    def whole_world(self, size: int, after: int = 0) -> list[Note]:
        """Return the "began" notes, by rank, of a world of this size later than world `after`."""

        def whole(notes: list[Note]) -> list[Note]:
            worlds: dict[int, dict[int, Note]] = {}
            for note in notes:
                if note["what"] == "began" and note["epoch"] > after and note["size"] == size:
                    worlds.setdefault(note["epoch"], {})[note["rank"]] = note
            found = [ranks for _, ranks in sorted(worlds.items()) if len(ranks) == size]
            return [found[-1][rank] for rank in range(size)] if found else []

        world: list[Note] = self.wait(whole, f"a world of {size} after world {after}")
        return world

    def end(self, seconds: float = END_SECONDS) -> None:
        """Let the workers return. Raises `JobError` unless the job ends with code 0."""
        (self.folder / END).touch()
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise JobError(f"no end in {seconds:.0f} s:\n{self.log.read_text()[-6000:]}") from None
        if code:
            raise JobError(f"exit code {code}:\n{self.log.read_text()[-6000:]}")
        self.read()


@contextmanager
def elastic_job(
    flags: Sequence[str],
    program: Sequence[str],
    variables: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    folder: Path | None = None,
) -> Iterator[ElasticJob]:
    """Start hvdlite-run with `flags` and ``elastic_worker.py FOLDER PROGRAM``.

    `before` stands before the command, and `folder` is where workers write their notes, if that is
    not to be a temporary one. At the end no process is left. Raises `JobError` where one was.
    """
    with tempfile.TemporaryDirectory() as temporary:
        notes = Path(temporary) / "notes" if folder is None else folder
        notes.mkdir(exist_ok=True)
        log, files = Path(temporary) / "log", Path(temporary) / "files"
        files.mkdir()
        words = [sys.executable, "-m", "hvdlite.launcher", *flags]
        words += [sys.executable, str(WORKER), str(notes), *program]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*before, *words], stdout=output, stderr=subprocess.STDOUT, cwd=HERE.parent,
                stdin=subprocess.DEVNULL,
                env={**environment(), **(variables or {}), MARK: temporary, "TMPDIR": str(files)},
            )  # fmt: skip
        try:
            yield ElasticJob(notes, process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
            process.wait()
            left = [*wait_for_none(temporary).values(), *own_files(files)]
        if left:
            raise JobError(f"left behind: {left}\n{log.read_text()[-6000:]}")


def own_files(folder: Path) -> list[str]:
    """Return the temporary files that are not those of torch, which keeps a cache."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torch")]


def wait_for_none(mark: str, seconds: float = 5.0) -> dict[int, str]:
    """Return the processes of a job that do not end within some seconds, killed: command lines."""
    end = time.monotonic() + seconds
    while (left := processes(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def processes(mark: str) -> dict[int, str]:
    """Return the command lines of the processes of the job with this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It has ended, or belongs to another user.
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    return found


def of_world(notes: Iterable[Note], what: str, numbers: Iterable[int], after: int) -> list[Note]:
    """Return the first `what` of each worker in worlds after `after`; [] until all have one."""
    first: dict[int, Note] = {}
    for note in notes:
        if note["what"] == what and note["epoch"] > after:
            first.setdefault(note["number"], note)
    wanted = list(numbers)
    return [first[number] for number in wanted] if first.keys() >= set(wanted) else []
