"""Jobs that are suspended as a whole, as Slurm does to make room, and go on after long."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launcher.elastic.jobs import elastic
from tests.launcher.jobs import MARK, processes, start
from tests.launcher.other_hosts import make_ssh
from tests.limits import patient

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.timeout(120),
]
LIMIT_SECONDS = 3.0  # For which another host, or a server, may be silent.
END_SECONDS = patient(30.0)

SUMS = """
import os, sys, time
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
step = 0
while hvd.allreduce(np.array([os.path.exists(sys.argv[1])], int), op=hvd.Sum)[0] < hvd.size():
    assert hvd.allreduce(np.full(9, step), name="x", op=hvd.Sum)[0] == step * hvd.size()
    step += 1
    if step == 3:
        print("up", flush=True)
    time.sleep(0.01)
print("ended", flush=True)
"""
SERVED = """
import os, sys, time
import numpy as np
from hvdlite.ps import context
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
context.init()
if context.role() == "server":
    context.serve()
values = [np.zeros(8)]
specs, options = [TensorSpec("0", "float64", (8,))], TableOptions("async")
table = context.worker().declare(context.PREFIX + "sums", specs, options, lambda: values)
table.pull(values)
while not os.path.exists(sys.argv[1]):
    table.push([np.ones(8)], {})
    table.pull(values)
    if table.clock == 3:
        print("up", flush=True)
    time.sleep(0.01)
print("ended", flush=True)
context.shutdown()
"""


def suspend(mark: Path, launcher: int, *, launcher_first: bool) -> None:
    """Stop all processes of a job for longer than the limit; let them go on one by one."""
    found = sorted(processes(str(mark)))  # Ranks in their order.
    found.sort(key=lambda pid: (pid != launcher) == launcher_first)
    for pid in reversed(found):  # Parents hear of it.
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5 * LIMIT_SECONDS)  # What the test is about.
    for pid in found:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)


def check(
    folder: Path, words: Sequence[str], code: str, *, launcher_first: bool, **variables: str
) -> None:
    """Suspend a job of two ranks, which run `code`, and let it go on."""
    program = (sys.executable, "-c", code, str(folder / "end"))
    with start("-np", "2", *words, *program, **variables, **{MARK: str(folder)}) as process:
        assert process.stdout is not None
        assert [process.stdout.readline()[-3:] for _ in range(2)] == ["up\n"] * 2
        suspend(folder, process.pid, launcher_first=launcher_first)
        (folder / "end").touch()
        out, err = process.communicate(timeout=END_SECONDS)
    assert (process.returncode, out.count("ended")) == (0, 2), err


@pytest.mark.parametrize("launcher_first", [True, False])
def test_a_job_on_two_hosts(tmp_path: Path, launcher_first: bool) -> None:
    words = "--no-check-hosts", "-H", "localhost:1,other:1", "--peer-timeout", str(LIMIT_SECONDS)
    check(tmp_path, words, SUMS, launcher_first=launcher_first, **make_ssh(tmp_path))


def test_a_rank_is_not_late_for_what_it_could_not_submit(tmp_path: Path) -> None:
    """Another one waits for it when the job is suspended."""
    code = SUMS.replace("    time.sleep(0.01)", "    time.sleep(2.0 * hvd.rank())")
    limits = {"HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": str(LIMIT_SECONDS)}
    check(tmp_path, (), code, launcher_first=False, **limits)


def test_a_job_with_servers(tmp_path: Path) -> None:
    limits = "--ps-timeout", str(LIMIT_SECONDS), "--ps-worker-timeout", str(LIMIT_SECONDS)
    words = "--ps-servers", "2", *limits
    check(tmp_path, words, SERVED, launcher_first=False)


def test_an_elastic_job_keeps_its_workers(tmp_path: Path) -> None:
    hosts = "-H", "localhost:2", "--min-np", "1", "--peer-timeout", str(LIMIT_SECONDS)
    with elastic(tmp_path, "-np", "2", *hosts) as job:
        before = job.watch.world(2)
        suspend(tmp_path, job.watch.process.pid, launcher_first=True)
        assert job.end() == 0, "\n".join(job.watch.err)
    assert {place.epoch for place in job.watch.places()} == {before[0].epoch}
