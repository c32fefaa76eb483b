"""What ranks of other hosts say through mpirun: whole lines of one rank each, and events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.decisions.endings import FirstFailure
from hvdlite.launcher.mpirun.mpi import HYDRA, OPENMPI
from hvdlite.launcher.mpirun.pipes import Pipes
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.output import Output

TOKEN = "hvdlite-rank-0123"


class Job(SimpleNamespace):
    """What pipes know of their job."""

    @property
    def all_started(self) -> bool:
        return len(self.first_failure.started) == self.options.num_proc


class Mpirun:
    """Pipes that read what `say` writes in the place of an mpirun; `shown` is what is printed."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.shown: list[bytes] = []
        self.heard = FirstFailure()
        self.loop = EventLoop()
        output = Output(range(2), None, timestamps=False)
        self._finish = output.finish
        output.write = lambda stream, text: self.shown.append(text)  # type: ignore[method-assign]
        options: Any = LaunchOptions(
            command=("true",), num_proc=2, variables={}, start_timeout_seconds=1.0
        )
        job: Any = Job(options=options, loop=self.loop, first_failure=self.heard, output=output)
        self.pipes = Pipes(str(folder), TOKEN, kind, job)

    def say(self, data: bytes) -> None:
        self.pipes.read_mpirun("stderr", data)

    def end(self) -> None:
        self.pipes.read_mpirun("stderr", b"")
        self.pipes.print_early()
        self._finish()
        self.loop.close()


@pytest.fixture(params=[HYDRA, OPENMPI])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def mpich(tmp_path: Path) -> Iterator[Mpirun]:
    made = Mpirun(HYDRA, tmp_path)
    yield made
    made.pipes.close()


def mark(rank: int) -> bytes:
    return f"[{TOKEN}.{rank}] ".encode()


@pytest.mark.parametrize("bytes_at_once", [1, 7, 1000])
def test_parts_of_lines_that_mpich_has_glued_come_apart(mpich: Mpirun, bytes_at_once: int) -> None:
    """Recorded of MPICH 5.0.2, whose marks stand before parts of lines, too."""
    said = (
        mark(0) + b"rank 0 a," + mark(1) + b"rank 1 a," + mark(0) + b" b\n"
        + mark(0) + b"[1] no mark," + mark(1) + b" b\n" + mark(0) + b"\n" + mark(1) + b"last"
    )  # fmt: skip
    for start in range(0, len(said), bytes_at_once):
        mpich.say(said[start : start + bytes_at_once])
    mpich.end()
    assert mpich.shown == [
        b"[0]<stderr>:rank 0 a, b\n",
        b"[1]<stderr>:rank 1 a, b\n",
        b"[0]<stderr>:[1] no mark,\n",
        b"[1]<stderr>:last\n",
    ]


def test_events_are_found_in_what_is_glued(mpich: Mpirun) -> None:
    token = TOKEN.encode()
    mpich.say(mark(0) + token + b" sta" + mark(1) + token + b" start 1 12 there\n")
    mpich.say(mark(0) + b"rt 0 11 there\n")
    assert mpich.heard.started == {0: 11, 1: 12}
    mpich.say(mark(0) + b"no end" + mark(1) + b"no end, too" + mark(1) + token + b" exit 1 0\n")
    assert mpich.heard.codes == {1: 0}
    mpich.end()
    assert mpich.shown == [b"[0]<stderr>:no end\n", b"[1]<stderr>:no end, too\n"]


def test_a_line_goes_on_behind_an_event(mpich: Mpirun) -> None:
    token = TOKEN.encode()
    mpich.say(mark(0) + b"half " + mark(0) + token + b" start 0 11 there\n")
    mpich.say(mark(0) + b"a line\n")
    assert mpich.heard.started == {0: 11}
    mpich.end()
    assert mpich.shown == [b"[0]<stderr>:half a line\n"]


def test_a_harmless_warning_of_open_mpi_is_dropped(kind: str, tmp_path: Path) -> None:
    mpirun = Mpirun(kind, tmp_path)
    mpirun.say(b"[a:1] plm:ssh: Warning: setpgid(7,7) failed in parent with errno=Permission\n")
    mpirun.say(b"something that matters\n")
    mpirun.end()
    assert mpirun.shown == [b"something that matters\n"]
