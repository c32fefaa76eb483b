"""What workers print: marks with the rank at the start, and files that nobody overwrites."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdlite.launcher.processes.output import Output


def output(directory: Path | None = None, num_proc: int = 12) -> Output:
    given = None if directory is None else str(directory)
    return Output(range(num_proc), given, False, elastic=True)


def test_lines_have_the_rank_at_the_start(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    printed = output()
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


def test_the_end_tells_the_exception(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    printed = output()
    printed.begin(3, 0)
    traceback = b"Traceback (most recent call last):\n  File x\nValueError: no data\n"
    printed.feed(3, "stderr", traceback)
    assert printed.end(3) == "ValueError: no data"
    assert printed.end(3) is None


def test_each_worker_has_files_of_its_own(tmp_path: Path) -> None:
    printed = output(tmp_path / "logs")
    for number in (0, 1, 2):
        printed.begin(number, 3)
        printed.feed(number, "stdout", f"worker {number}\n".encode())
        printed.end(number)
    assert printed._files == {}
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["rank.03", "rank.03.1", "rank.03.2"]
    for number, name in enumerate(names):
        assert (tmp_path / "logs" / name / "stdout").read_text() == f"worker {number}\n"
