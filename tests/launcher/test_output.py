"""How output is put into lines, and where it goes when that place is difficult."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.cli import main
from hvdlite.launcher.processes import console
from hvdlite.launcher.processes import output as output_module
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.error_text import last_exception
from hvdlite.launcher.processes.output import Output
from tests.forks import NUMPY, forks
from tests.launcher.jobs import LAUNCHER, launch
from tests.limits import HANG_SECONDS
from tests.parallel.jobs import environment


def test_lines_are_whole_and_carry_their_rank(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(range(2), None, timestamps=False)
    output.feed(0, "stdout", b"one\ntw")
    output.feed(1, "stdout", b"other\n")
    output.feed(0, "stdout", b"o\nthree")
    output.feed(1, "stderr", b"bad\n")
    output.finish()
    out, err = capfd.readouterr()
    assert out == "[0]<stdout>:one\n[1]<stdout>:other\n[0]<stdout>:two\n[0]<stdout>:three\n"
    assert err == "[1]<stderr>:bad\n"


def test_a_progress_bar_moves_on_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(range(1), None, timestamps=False)
    output.feed(0, "stdout", b"10%\r20%\r")
    output.feed(0, "stdout", b"\nend\r\n")
    out, _ = capfd.readouterr()
    assert out == "[0]<stdout>:20%\r\n[0]<stdout>:end\r\n"


def test_time_comes_before_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    Output(range(1), None, timestamps=True).feed(0, "stdout", b"x\n")
    out, _ = capfd.readouterr()
    when, _, rest = out.partition("[")
    assert len(when) == len("Mon Nov 21 04:06:00 2026")
    assert rest == "0]<stdout>:x\n"


def test_files_hold_the_bytes_of_each_rank(tmp_path: Path) -> None:
    output = Output(range(11), str(tmp_path / "logs"), timestamps=False)
    output.feed(3, "stderr", b"raw\x00\xff no end")
    output.close()
    assert (tmp_path / "logs" / "rank.03" / "stderr").read_bytes() == b"raw\x00\xff no end"
    assert (tmp_path / "logs" / "rank.10" / "stdout").read_bytes() == b""


def test_files_that_cannot_be_written_are_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output-filename"):
        Output(range(2), str(tmp_path / "file"), timestamps=False)


def test_a_line_that_is_redrawn_is_printed_once_in_its_last_state(
    capfd: pytest.CaptureFixture[str],
) -> None:
    output = Output(range(2), None, timestamps=False)
    for percent in range(0, 101, 10):  # as tqdm does: the return comes first
        output.feed(0, "stderr", f"\r{percent}% rank 0".encode())
        output.feed(1, "stderr", f"\r{percent}% rank 1".encode())
    output.feed(1, "stderr", b"\n")
    output.feed(0, "stderr", b"\nafter\n")
    _, err = capfd.readouterr()
    assert err == "[1]<stderr>:100% rank 1\n[0]<stderr>:100% rank 0\n[0]<stderr>:after\n"


def test_a_bar_that_is_wiped_away_leaves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(range(1), None, timestamps=False)
    output.feed(0, "stderr", b"\r90%\r100%\r    \r")
    output.feed(0, "stderr", b"done\n")
    output.feed(0, "stderr", b"\r5%")
    output.finish()
    assert capfd.readouterr().err == "[0]<stderr>:done\n[0]<stderr>:5%\n"


def test_a_long_bar_is_printed_now_and_then(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(output_module.time, "monotonic", lambda: now)
    output = Output(range(1), None, timestamps=False)
    for second in range(25):
        now = float(second)
        output.feed(0, "stderr", f"\r{second}".encode())
    output.feed(0, "stderr", b"\rend\n")
    assert capfd.readouterr().err.splitlines() == [f"[0]<stderr>:{n}" for n in (10, 20, "end")]


class Terminal(Console):
    """A console that notes what a person would see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def is_terminal(self, stream: str) -> bool:
        return True

    def draw(self, stream: str, text: bytes) -> None:
        self.seen.append(f"draw {text.decode()}")

    def erase(self) -> None:
        self.seen.append("erase")

    def write(self, stream: str, text: bytes) -> None:
        self.seen += text.decode().splitlines()


def test_a_terminal_shows_the_bar_of_the_lowest_rank_alone() -> None:
    terminal = Terminal()
    output = Output(range(2), None, timestamps=False, console=terminal)
    for rank, data in ((0, b"\r1%"), (1, b"\r2%"), (0, b"\r3%"), (0, b"\n"), (1, b"\r4%")):
        output.feed(rank, "stderr", data)
    assert terminal.seen == [
        "draw [0]<stderr>:1%",
        "draw [0]<stderr>:3%",
        "erase",
        "[0]<stderr>:3%",
        "draw [1]<stderr>:4%",
    ]


def test_memory_does_not_grow_with_the_states_of_a_line() -> None:
    output = Output(range(1), None, timestamps=False, console=Terminal())
    for number in range(1000):
        output.feed(0, "stderr", b"\r" + b"#" * 1000 + str(number).encode())
    assert sum(map(len, output._rest.values())) < 2000


def test_a_rank_that_is_debugged_prints_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(range(2), None, timestamps=False, raw_rank=1)
    output.feed(1, "stdout", b"(Pdb) ")
    output.feed(0, "stdout", b"x\n")
    assert capfd.readouterr().out == "(Pdb) [0]<stdout>:x\n"


GROUP = b"""\
  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 9, in <module>
  |     raise ExceptionGroup("two", errors)
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 3, in <module>
    | ValueError: a
    +---------------- 2 ----------------
    | Exception Group Traceback (most recent call last):
    |   File "a.py", line 5, in <module>
    | ExceptionGroup: inner (1 sub-exception)
    +-+---------------- 1 ----------------
      | KeyError: 'b'
      +------------------------------------
"""


@pytest.mark.parametrize(
    ("printed", "exception"),
    [
        (b"", ""),
        (b"ValueError: only said\n", ""),
        (b"Traceback (most recent call last):\n  File x, line 1\n    f()\nKeyError: 'a'\nbye\n",
         "KeyError: 'a'"),
        (b"Traceback (most recent call last):\n  File x\nmy.errors.Bad: one\ntwo\n", "Bad: one"),
        (b"Traceback (most recent call last):\n  File x\nStopIteration\n", "StopIteration"),
        (b"Traceback (most recent call last):\n  File x\nE: 1\n\nDuring handling of the above "
         b"exception, another exception occurred:\n\nTraceback (most recent call last):\n"
         b"  File y\nF: 2\n", "F: 2"),
        (b'  File "t.py", line 1\n    a b\nSyntaxError: invalid syntax\n',
         "SyntaxError: invalid syntax"),
        (b"Traceback (most recent call last):\n  File x\nE: \xff\n", "E: \ufffd"),
        (b"Traceback (most recent call last):\n  File x, line", ""),
        (b"Traceback (most recent call last):\n  File x\nf.<locals>.Bad: one\n", "Bad: one"),
        ("Traceback (most recent call last):\n  File x\n\u00c4rger: 1\n".encode(), "\u00c4rger: 1"),
        (GROUP, "ExceptionGroup: two (2 sub-exceptions)"),
        (GROUP + b"Traceback (most recent call last):\n  File x\nE: 1\n", "E: 1"),
        (b"Traceback (most recent call last):\n  File x\nE: 1\n" + GROUP,
         "ExceptionGroup: two (2 sub-exceptions)"),
    ],
)  # fmt: skip
def test_the_exception_at_the_end_of_a_traceback(printed: bytes, exception: str) -> None:
    assert last_exception(printed) == exception


def test_lines_of_elastic_workers_have_their_rank_at_the_start(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    printed = Output(range(12), None, False, elastic=True)
    printed.begin(7, 1)
    printed.begin(8, 1)
    printed.feed(7, "stdout", b"one ")
    printed.feed(8, "stdout", b"two\n")
    printed.feed(7, "stdout", b"line\n")
    printed.feed(7, "stderr", b"unended")
    assert printed.end(7) is None
    assert capfdbinary.readouterr() == (
        b"[1]<stdout>:two\n[1]<stdout>:one line\n", b"[1]<stderr>:unended\n"
    )  # fmt: skip


def test_the_end_of_an_elastic_worker_tells_the_exception(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    printed = Output(range(12), None, False, elastic=True)
    printed.begin(3, 0)
    traceback = b"Traceback (most recent call last):\n  File x\nValueError: no data\n"
    printed.feed(3, "stderr", traceback)
    assert printed.end(3) == "ValueError: no data"
    assert printed.end(3) is None


def test_each_elastic_worker_has_files_of_its_own(tmp_path: Path) -> None:
    printed = Output(range(12), str(tmp_path / "logs"), False, elastic=True)
    for number in (0, 1, 2):
        printed.begin(number, 3)
        printed.feed(number, "stdout", f"worker {number}\n".encode())
        printed.end(number)
    assert printed._files == {}
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["rank.03", "rank.03.1", "rank.03.2"]
    for number, name in enumerate(names):
        assert (tmp_path / "logs" / name / "stdout").read_text() == f"worker {number}\n"


MANY = "import sys\nfor i in range(2000): print('y' * 100)\nprint('end')"
MANY_BYTES = 2 * (2000 * (101 + 12) + 4 + 12)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_does_not_block_gets_every_byte(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = forks(*NUMPY)(
        [*LAUNCHER, "-np", "2", sys.executable, "-c", MANY],
        env=environment(PYTHONUNBUFFERED=unbuffered), stdout=writer, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, err) == (0, b"")
    assert len(data) == MANY_BYTES
    assert data.count(b"end\n") == 2


@pytest.mark.parametrize(
    ("launcher", "closed"),
    [("ssh", ">&-"), ("ssh", "2>&-"), ("ssh", "<&- >&- 2>&-"), ("mpirun", "<&- >&- 2>&-")],
    indirect=["launcher"],
)
def test_streams_that_are_closed_are_empty(launcher: str, closed: str, tmp_path: Path) -> None:
    script = "import sys, os\nprint('out'); print('err', file=sys.stderr)\nsys.exit(5)"
    words = ["-np", "2", "--output-filename", str(tmp_path), sys.executable, "-c", script]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *LAUNCHER, *words],
        env=environment(), capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 5
    assert done.stdout.count(":out\n") == (0 if " >&-" in f" {closed}" else 2)
    assert ("rank 0 failed" in done.stderr or "rank 1 failed" in done.stderr) == (
        "2>&-" not in closed
    )
    for rank in range(2):
        folder = tmp_path / f"rank.{rank}"
        assert (folder / "stdout").read_text() == "out\n"
        assert (folder / "stderr").read_text() == "err\n"


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    script = "for i in range(3): print('line', i, flush=True)"
    words = ("-np", "2", "--output-filename", str(tmp_path))
    done = launch(*words, sys.executable, "-c", script)
    assert done.returncode == 0
    assert done.stdout.count(":line 2\n") == 2
    assert done.stderr.count("--output-filename: rank 0: [Errno 28]") == 1
    assert (tmp_path / "rank.1" / "stdout").read_text() == "line 0\nline 1\nline 2\n"


def test_a_full_disk_behind_standard_output_is_said_once() -> None:
    with open("/dev/full", "wb") as full:
        process = forks(*NUMPY)(
            [*LAUNCHER, "-np", "2", "sh", "-c", "echo one; sleep 0.1; echo two"],
            env=environment(), stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    assert err.count("cannot write to stdout, and goes on without") == 1


@pytest.mark.parametrize(
    ("number", "file", "remedy"),
    [
        (errno.ENOSPC, "/tmp/x", "free some space, or set TMPDIR to a folder that has some"),
        (errno.EROFS, "/tmp/x", "free some space, or set TMPDIR to a folder that has some"),
        (errno.EADDRNOTAVAIL, None, "is the loopback interface up? ip link set lo up"),
    ],
)
def test_what_a_host_lacks_is_one_sentence_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    number: int, file: str | None, remedy: str,
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), file)

    monkeypatch.setattr("hvdlite.launcher.cli._main", fail)
    assert main(["-np", "1", "true"]) == 1
    about = f"{os.strerror(number)}{' (/tmp/x)' if file else ''}"
    expected = f"hvdlite-run: this host cannot run the job: {about}: {remedy}\n"
    assert capfd.readouterr().err == expected


def test_whoever_speaks_while_a_job_runs_keeps_its_table_whole() -> None:
    """By the job: the console's own `say`, for the time before a job, knows of no table."""
    folder = Path(console.__file__).parent.parent
    imported = re.compile(r"processes\.console import [^\n]*\bsay\b|console\.say\(")
    speakers = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*.py"))
        if imported.search(path.read_text())
    ]
    assert speakers == ["cli.py", "jobs/start.py", "platforms/kubernetes.py"]
