"""hvdlite.run of elastic jobs: the results of the last world, and what is raised."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hvdlite
from hvdlite.common.base.errors import HorovodInternalError
from tests.launcher.jobs import executable
from tests.limits import HANG_SECONDS

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("forked", "by_value")]
HOSTS = "localhost:2,127.0.0.1:2"


def place() -> tuple[int, int]:
    import hvdlite.numpy as hvd

    hvd.init()
    hvd.barrier()
    return hvd.rank(), hvd.size()


def test_results_are_those_of_the_first_ranks_in_their_order() -> None:
    assert hvdlite.run(place, hosts=HOSTS, np=3, min_np=3, max_np=3) == [(0, 3), (1, 3), (2, 3)]
    assert hvdlite.run(place, hosts=HOSTS, min_num_proc=2) == [(0, 4), (1, 4)]


def test_slots_of_a_discovery_script(tmp_path: Path) -> None:
    script = executable(tmp_path / "hosts.sh", "echo localhost")
    results = hvdlite.run(place, host_discovery_script=str(script), slots=2, min_np=2)
    assert results == [(0, 2), (1, 2)]


def train(marker: str, fail: str) -> tuple[int, int]:
    """Do 20 steps; rank 1 fails at the sixth, once."""
    import numpy as np

    import hvdlite.numpy as hvd
    from hvdlite.numpy import elastic

    hvd.init()
    state = elastic.NumpyState(step=0)

    @elastic.run
    def loop(state: Any) -> int:
        while state.step < 20:
            if state.step == 5 and hvd.rank() == 1 and not os.path.exists(marker):
                Path(marker).touch()
                if fail == "raise":
                    raise ValueError("bad batch")
                os.kill(os.getpid(), 9)
            hvd.allreduce(np.ones(2), name="x")
            state.step += 1
            state.commit()
        return int(state.step)

    return hvd.rank(), loop(state)


@pytest.mark.parametrize("fail", ["raise", "kill"])
def test_a_worker_that_fails_does_not_count(tmp_path: Path, fail: str) -> None:
    results = hvdlite.run(train, (str(tmp_path / "x"), fail), hosts=HOSTS, np=2, min_np=2, max_np=2)
    assert results == [(0, 20), (1, 20)]


def always() -> None:
    import hvdlite.numpy as hvd

    hvd.init()
    raise KeyError(f"of {hvd.size()}")


def test_an_exception_that_ends_the_job_is_raised() -> None:
    with pytest.raises(KeyError, match="of 2") as caught:
        hvdlite.run(always, hosts=HOSTS, np=2, min_np=1, max_np=2)
    assert "on rank" in str(caught.value.__cause__)


def exit_early() -> None:
    import hvdlite.numpy as hvd

    hvd.init()
    os._exit(3)


def test_the_end_of_all_workers_is_an_error_that_names_them() -> None:
    with pytest.raises(HorovodInternalError, match="exit code 3"):
        hvdlite.run(exit_early, hosts=HOSTS, np=2, min_np=1, max_np=2)


def test_it_needs_hosts() -> None:
    for arguments in ({"min_num_proc": 1}, {"num_proc": 2, "min_np": 1}):
        with pytest.raises(ValueError, match="hosts, hostfile or host_discovery_script"):
            hvdlite.run(place, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--blacklist-cooldown-range 5 1"):
        hvdlite.run(place, hosts=HOSTS, min_np=1, cooldown_range=(5, 1))
    with pytest.raises(ValueError, match="--max-np needs"):
        hvdlite.run(place, hosts=HOSTS, max_np=3)


def test_under_the_name_horovod_its_policies_hold() -> None:
    """Commits wait for new hosts, and workers find Horovod's variables."""
    found = subprocess.run(
        [sys.executable, "-m", "hvdlite.as_horovod", "-c", AS_HOROVOD],
        capture_output=True, text=True, check=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    *error, last = found.stdout.splitlines()[-2:]
    assert last == "[('wait', True, '1', '1')]"
    assert re.fullmatch(
        r"RuntimeError: one or more processes exited with non-zero status: .*"
        r"rank 0 \(host localhost\[0\]\) was lost: .*KeyError: 'x' \(exit code 1\).* from .*'x'.*",
        error[0],
    ), error[0]


AS_HOROVOD = """
import os, horovod, hvdlite.launcher.function as function

def fail():
    import hvdlite.numpy as hvd
    hvd.init()
    raise KeyError("x")

try:
    horovod.run(fail, min_np=1, np=1, hosts="localhost:1")
except RuntimeError as error:
    print("RuntimeError:", error, "from", error.__cause__)

def look():
    return os.environ["HOROVOD_ELASTIC"], os.environ["HOROVOD_SIZE"]

run = function._run
def note(options, environ, call):
    policies = options.elastic.admit, options.as_horovod
    return [(*policies, *result) for result in run(options, environ, call)]
function._run = note
print(horovod.run(look, min_np=1, np=1, hosts="localhost:1"))
"""


def trained_and_killed() -> int:
    """Train, return from it, and let rank 1 be killed when its process ends."""
    import atexit

    if os.environ["HVDLITE_RANK"] == "1":
        atexit.register(os.kill, os.getpid(), 9)  # Called after hvdlite has left the job.
    import hvdlite.numpy as hvd
    from hvdlite.numpy import elastic

    hvd.init()
    state = elastic.NumpyState(step=0)

    @elastic.run
    def loop(state: Any) -> int:
        while state.step < 3:
            hvd.barrier()
            state.step += 1
            state.commit()
        return int(state.step)

    return loop(state)


def test_a_rank_that_is_killed_when_all_results_are_there() -> None:
    assert hvdlite.run(trained_and_killed, hosts=HOSTS, np=2, min_np=2, max_np=2) == [3, 3]
