"""Limits of elastic jobs on one host: time, resets, failures that come again, and stopped ranks."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launcher.elastic.jobs import elastic, kill
from tests.launcher.elastic_scenarios.sites import Site
from tests.launcher.jobs import executable, launch
from tests.launcher.other_hosts import make_ssh

pytestmark = pytest.mark.timeout(120)
FOR_EVER = ("--blacklist-cooldown-range", "3600", "3600")  # a failed host stays away


def test_missing_slots_end_the_job_after_the_elastic_timeout(site: Site) -> None:
    hosts = ("-H", site.spread(2, hosts=2), *FOR_EVER)
    words = ("-np", "2", "--min-np", "2", "--elastic-timeout", "2", *hosts)
    with site.elastic(*words) as watch:
        first = watch.world(2)
        begin = time.monotonic()
        site.kill(first[1])
        assert watch.finish() == 1
        assert 1.9 < time.monotonic() - begin < 30
    last = watch.err[-1]
    assert "1 of 2" in last or "1 slot" in last, last


def test_slots_that_never_come_end_the_job_at_its_start(tmp_path: Path) -> None:
    script = executable(tmp_path / "hosts.sh", "echo localhost:1")
    words = ("-np", "2", "--elastic-timeout", "1", "--host-discovery-script", str(script))
    done = launch(*words, "touch", str(tmp_path / "x"))
    assert done.returncode == 1
    assert not (tmp_path / "x").exists()


def test_a_loss_beyond_the_reset_limit_ends_the_job(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "2", "--min-np", "1", "--reset-limit", "0") as job:
        kill(job.watch.world(2)[1])
        assert job.watch.finish() == 1
    assert "limit 0" in job.watch.err[-1] and "SIGKILL" in job.watch.err[-1]


def test_two_changes_of_hosts_need_two_resets(site: Site) -> None:
    old, new, _ = site.hosts
    words = ("-np", "1", *site.discovery(f"{old}:1"), "--reset-limit", "1")
    with site.elastic(*words) as watch:
        watch.world(1)
        site.show(f"{old}:1", f"{new}:1")
        watch.world(2)
        site.show(f"{new}:1")
        assert watch.finish() == 1
        assert "limit 1" in watch.err[-1]


def test_a_stopped_worker_is_given_up_and_harms_nothing(site: Site) -> None:
    """Also when it goes on after another one has come in its place."""
    with site.elastic(*site.flags(3)) as watch:
        first = watch.world(3)
        begin = time.monotonic()
        stopped = first[1].host, first[1].pid
        site.signal(*stopped, signal.SIGSTOP)
        two = watch.world(2)
        assert time.monotonic() - begin < 20
        again = watch.world(3, epoch=two[0].epoch + 1)
        assert first[1].number not in {place.number for place in again}
        with contextlib.suppress(ProcessLookupError):  # It may have been killed.
            site.signal(*stopped, signal.SIGCONT)
            deadline = time.monotonic() + 5
            while True:  # It ends by itself.
                site.signal(*stopped, 0)
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert {place.epoch for place in watch.places()} == {1, 2, 3}
        assert site.end(watch) == 0
    assert "stopped" in watch.line("lost")


STALL = """
import time
import numpy as np
import hvdlite.numpy as hvd

hvd.init()

@hvd.elastic.run
def train(state):
    if hvd.size() == 2:
        state.commit()
        if hvd.rank() == LATE:
            time.sleep(100)
    hvd.allreduce(np.ones(2), name="x")
    print("reduced by", hvd.size(), flush=True)

train(hvd.elastic.NumpyState(step=0))
"""


@pytest.mark.parametrize("late", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_only_the_late_rank_is_given_up_after_the_stall_shutdown_time(late: int) -> None:
    words = ("-np", "2", "--min-np", "1", "--reset-limit", "1", "python", "-c")
    script = STALL.replace("LATE", str(late))
    begin = time.monotonic()
    done = launch(*words, script, HVDLITE_STALL_SHUTDOWN_TIME_SECONDS="1")
    assert done.returncode == 0, done.stderr
    assert 1 < time.monotonic() - begin < 40
    assert done.stdout.count("reduced by 1") == 1
    assert re.search(rf"rank {late} .* was lost: it was late for a tensor", done.stderr)


HOLD = """
import ctypes, os, sys, time
import numpy as np
import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError

hvd.init()
print("pid", os.getpid(), flush=True)
if hvd.rank() == 1:
    ctypes.PyDLL(None).usleep(int(sys.argv[1]) * 1000)
try:
    hvd.allreduce(np.ones(2), name="x")
    print("reduced", flush=True)
except HorovodInternalError as error:
    print("error", error, flush=True)
os._exit(0)
"""


def test_a_worker_that_never_lets_go_of_python_is_given_up() -> None:
    """As code in C does that hangs: its process runs, and nobody hears of it."""
    words = ("-np", "2", "--min-np", "1", "--reset-limit", "0", "python", "-c", HOLD)
    begin = time.monotonic()
    done = launch(*words, "100000", HVDLITE_ELASTIC_WORKER_TIMEOUT="2")
    assert 2 < time.monotonic() - begin < 40
    assert "it has not answered for 2 seconds" in done.stderr


def test_a_worker_that_holds_python_for_a_while_is_not_given_up() -> None:
    words = ("-np", "2", "--min-np", "1", "python", "-c", HOLD, "1200")
    done = launch(*words, HVDLITE_ELASTIC_WORKER_TIMEOUT="3")
    assert (done.returncode, done.stdout.count("reduced")) == (0, 2), done.stderr


ONCE = """
import os, sys
from pathlib import Path
import numpy as np
import hvdlite.numpy as hvd
from hvdlite.numpy import elastic

hvd.init()
state = elastic.NumpyState(step=0)
marker = Path(sys.argv[1])

@elastic.run
def train(state):
    while state.step < 10:
        if state.step == 5 and {when}:
            marker.touch()
            {fail}
        hvd.allreduce(np.ones(2), name="x")
        state.step += 1
        state.commit()
    return state.step

print("result", train(state), flush=True)
"""


def run_once(site: Site, when: str, fail: str, min_np: int = 2) -> tuple[int, list[str], str]:
    """Run a script that fails after its fifth commit; return code, results and last line."""
    (site.folder / "once.py").write_text(ONCE.format(when=when, fail=fail))
    words = ("-np", "2", "--min-np", str(min_np), "-H", site.spread(2))
    script = (str(site.inside / name) for name in ("once.py", "marker"))
    with site.launch(*words, "python", *script) as watch:
        code = watch.finish(40)
    results = [line.partition(":")[2] for line in sorted(watch.out) if "result" in line]
    return code, results, watch.err[-1]


INTERNAL = "raise hvd.HorovodInternalError('bad batch')"  # No rank is lost by it.


def test_an_error_of_one_rank_is_made_good(site: Site) -> None:
    when = "hvd.rank() == 1 and not marker.exists()"
    code, results, _ = run_once(site, when, INTERNAL)
    assert (code, results) == (0, ["result 10"] * 2)


def test_an_exception_on_every_rank_ends_the_job(site: Site) -> None:
    code, results, last = run_once(site, "True", "raise ValueError('bad batch')")
    assert (code, results) == (1, [])
    assert "ValueError: bad batch" in last


@pytest.mark.parametrize(
    ("when", "fail", "error"),
    [
        ("hvd.rank() == 0", "raise ValueError('bad batch')", "ValueError"),
        ("True", INTERNAL, "HorovodInternalError"),
    ],
)
def test_an_exception_that_comes_again_ends_the_job(
    site: Site, when: str, fail: str, error: str
) -> None:
    code, results, last = run_once(site, when, fail)
    assert (code, results) == (1, [])
    assert f"{error}: bad batch" in last and "3 resets without a new commit" in last


def test_a_rank_that_exits_early_leaves_the_rest_to_the_others(site: Site) -> None:
    code, results, last = run_once(site, "hvd.rank() == 1", "sys.exit(0)", min_np=1)
    assert (code, results) == (0, ["result 10"])
    assert "rank 1 (host" in last and "done" in last


def test_a_host_whose_ssh_hangs_is_named_and_left_out(tmp_path: Path) -> None:
    variables = make_ssh(tmp_path, before="exec sleep 600")
    flags = ("-np", "1", "--min-np", "1", "--start-timeout", "1", "--no-check-hosts")
    script = "import hvdlite.numpy as hvd; hvd.init(); print(hvd.size(), 'rank')"
    words = (*flags, "-H", "localhost:1,other:1", "python", "-c", script)
    done = launch(*words, **variables)
    assert done.returncode == 0 and "1 rank" in done.stdout, done.stderr
    assert (
        "host other was lost: ssh connects, and has not started Python in 1 seconds. Remedy: look "
        "at what hangs there by: ssh other true; it is tried again in 1 s" in done.stderr
    )
