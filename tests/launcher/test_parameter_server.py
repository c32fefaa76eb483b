"""Jobs with servers: hvdlite-run starts the scheduler and servers, and starts lost ones again."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.jobs import launch, start
from tests.launcher.other_hosts import make_ssh

PROGRAM = (sys.executable, "-m", "tests.ps.scripts.raw_sums")
SUMS = "sums {} {}".format(*(20 * (1.0 + 2.0), 20 * 2.0))


def test_servers_run_on_all_hosts(tmp_path: Path) -> None:
    """On the hosts in turn, where agents start them; the scheduler listens for other hosts."""
    flags = "-np", "2", "-H", "localhost:1,far:1", "--no-check-hosts", "--ps-servers", "2"
    flags += "--output-filename", str(tmp_path / "out")
    done = launch(*flags, *PROGRAM, str(tmp_path), "20", **make_ssh(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "[server 1]<stdout>:server 1 is here: far" in done.stdout
    assert [f"[{rank}]<stdout>:{SUMS}" in done.stdout for rank in range(2)] == [True, True]
    assert "WARNING" not in done.stderr
    assert (tmp_path / "out" / "server.0" / "stdout").read_text().startswith("server 0 is")


def test_a_killed_server_is_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    flags = "-np", "2", "--ps-servers", "2", "--ps-snapshot", str(tmp_path / "saved")
    words = *flags, "--ps-snapshot-every", "1", *PROGRAM, str(tmp_path), "20"
    done = launch(*words, KILL="server 1 9")
    assert done.returncode == 0, done.stderr
    said = "server 1 was killed by SIGKILL: it is started again (1 of 3, --ps-restarts)"
    assert said in done.stderr
    assert done.stdout.count(SUMS) == 2
    assert done.stdout.count("server 1 is here") == 2


def test_a_server_that_is_lost_for_good_ends_the_job(tmp_path: Path) -> None:
    flags = "-np", "2", "--ps-servers", "2", "--ps-restarts", "0"
    done = launch(*flags, *PROGRAM, str(tmp_path), "20", KILL="server 1 9")
    assert done.returncode == 1
    assert "HorovodInternalError: server 1 was killed by SIGKILL, and no" in done.stderr


def test_a_server_that_fails_ends_the_job_with_its_reason() -> None:
    code = (
        "import os, sys\nimport hvdlite.numpy as hvd\nfrom hvdlite.ps import context\n"
        "context.init()\n"
        "if os.environ['HVDLITE_ROLE'] == 'server': hvd.rank()"
    )
    done = launch("-np", "2", "--ps-servers", "1", sys.executable, "-c", code)
    assert done.returncode == 1
    reason = "ValueError: hvdlite has not been initialized"
    assert f"the scheduler says: server 0 failed: {reason}" in done.stderr


def test_a_server_that_fails_unnoticed_is_the_failure_of_the_job() -> None:
    """No worker asks it for anything."""
    code = "import os; assert os.environ['HVDLITE_ROLE'] == 'worker', 'no server'"
    done = launch("-np", "2", "--ps-servers", "1", sys.executable, "-c", code)
    assert done.returncode == 1
    assert "hvdlite-run: server 0 failed: AssertionError: no server (exit code 1)" in done.stderr


def test_an_independent_worker_that_is_killed_returns(tmp_path: Path) -> None:
    flags = "-np", "2", "--ps-servers", "1", "--ps-workers", "independent"
    done = launch(*flags, *PROGRAM, str(tmp_path), "20", KILL="worker 1 9")
    assert done.returncode == 0, done.stderr
    assert "worker 1 was killed by SIGKILL: it is started again (1 of 3" in done.stderr
    assert done.stdout.count(SUMS) == 2


def test_independent_workers_go_on_without_one_that_fails(tmp_path: Path) -> None:
    flags = "-np", "2", "--ps-servers", "1", "--ps-workers", "independent"
    words = *flags, "--ps-worker-timeout", "1", *PROGRAM, str(tmp_path), "20"
    done = launch(*words, FAIL="1")
    assert done.returncode == 3, done.stderr
    assert "worker 1 failed with exit code 3: the other workers go on" in done.stderr
    assert f"[0]<stdout>:sums {5 * 3.0 + 15 * 1.0} {5 * 2.0 + 15 * 1.0}" in done.stdout


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, "mpi"), (signal.SIGTERM, "independent")]
)
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, kind: str) -> None:
    """No process, no file, as `start` sees to, and no port; and Ctrl-C is one line."""
    flags = "-np", "2", "--ps-servers", "2", "--ps-workers", kind
    words = *flags, *PROGRAM, str(tmp_path), "100000000"
    with start(*words) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert sum("is here" in line for line in lines) == 4
        begin = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 128 + number
        assert time.monotonic() - begin < 25
        if number == signal.SIGINT:
            assert err == "hvdlite-run: ended by SIGINT\n"
