"""Elastic jobs on one host: workers that die, hosts that come and go, and the end of the job."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.top.connection import JobConnection, find_jobs
from tests.forks import NUMPY
from tests.launcher.elastic.jobs import Watch, elastic, kill
from tests.launcher.jobs import MARK, executable, launch, processes, start

pytestmark = pytest.mark.timeout(120)


@contextmanager
def viewer(launcher: int) -> Iterator[JobConnection]:
    """One who looks at the job of a launcher."""
    loop = EventLoop()
    (path,) = [path for path in find_jobs()[0] if path.endswith(f"/{launcher}.sock")]
    connection = JobConnection(loop, path)
    try:
        yield connection
    finally:
        connection.close()
        loop.close()


def heard_of(connection: JobConnection, ranks: int, since: float) -> dict[str, Any]:
    """Return the job as soon as all its ranks were heard of since then, and no other one."""
    end = time.monotonic() + 30
    while True:
        job = connection.ask_now(["look"])
        late = [row["rank"] for row in job["ranks"] if row["age"] > job["at"] - since]
        if [row["rank"] for row in job["ranks"]] == list(range(ranks)) and not late:
            return job
        assert time.monotonic() < end, job
        time.sleep(0.02)


def folder_of(worker: int) -> Path:
    """Return the folder of the agent of a worker."""
    variables = Path(f"/proc/{worker}/environ").read_text().split("\0")
    (events,) = [each for each in variables if each.startswith("HVDLITE_LAUNCHER_EVENTS=")]
    return Path(events.split(" ", 2)[2]).parent


@pytest.mark.parametrize(("rank", "forked"), [(0, NUMPY), (1, ())], ids=["0", "1, not forked"])
def test_a_killed_worker_is_replaced(tmp_path: Path, rank: int, forked: tuple[str, ...]) -> None:
    """Each process has files of its own."""
    words = ("-np", "2", "--min-np", "1", "--output-filename", str(tmp_path / "logs"))
    with elastic(tmp_path, *words, forked=forked) as job:
        first = job.watch.world(2)
        with viewer(job.watch.process.pid) as connection:
            heard_of(connection, 2, time.time())
            kill(first[rank])
            (alone,) = job.watch.world(1)
            assert alone.pid == first[1 - rank].pid
            again = job.watch.world(2, epoch=alone.epoch + 1)
            assert again[0].pid == alone.pid and again[0].step >= alone.step
            assert again[1].step == again[0].step
            kinds = [event["kind"] for event in heard_of(connection, 2, time.time())["events"]]
            assert kinds.count("failure") == 1 and kinds.count("world") >= 2
        pipes = {path.name for path in folder_of(again[0].pid).glob("orders.*")}
        assert pipes == {f"orders.{place.number}" for place in again}, "none of the dead one"
        assert job.end() == 0
    assert any("killed by SIGKILL" in line for line in job.watch.err)
    assert sum("done rank" in line for line in job.watch.out) == 2
    logs = {path.name: (path / "stdout").read_text() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == sorted(["rank.0", "rank.1", f"rank.{again[1].start}.1"])
    assert f"pid {first[rank].pid} " in logs[f"rank.{rank}"]
    assert "done rank 1" in logs[f"rank.{again[1].start}.1"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_signal_to_the_launcher_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    with elastic(tmp_path, "-np", "2", "--min-np", "1") as job:
        job.watch.world(2)
        job.watch.process.send_signal(number)
        assert job.watch.finish(30) == code
        job.wait_for_nothing(20.0)
    if number != signal.SIGKILL:
        first, *others = job.watch.err
        assert first.startswith("hvdlite-run: world 1 has 2 ranks")
        assert others == [f"hvdlite-run: ended by {signal.Signals(number).name}"]


@pytest.mark.parametrize("elastic_loop", [False, True])
def test_a_script_without_an_elastic_loop_is_told_its_remedy(elastic_loop: bool) -> None:
    script = (
        "import os, numpy as np, hvdlite.numpy as hvd; hvd.init()\n"
        "def train(state=None):\n"
        "    while True:\n"
        "        if hvd.rank() == 1: os.kill(os.getpid(), 9)\n"
        "        hvd.allreduce(np.ones(1), name='x')\n"
        "        if hvd.size() == 1: return\n"
    )
    script += "hvd.elastic.run(train)(hvd.elastic.NumpyState())" if elastic_loop else "train()"
    done = launch("-np", "2", "--min-np", "1", "python", "-c", script)
    last = done.stderr.splitlines()[-1]
    assert ("Remedy: put its training loop into a function with @hvd.elastic.run" in last) == (
        not elastic_loop
    )
    assert (done.returncode == 0) == elastic_loop, done.stderr


def test_the_only_agent_that_is_killed_is_not_said_to_be_tried_again(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "2", "--min-np", "1", "-H", "localhost:2") as job:
        agent = Path(f"/proc/{job.watch.world(2)[0].pid}/stat").read_text()
        os.kill(int(agent.rpartition(")")[2].split()[1]), signal.SIGKILL)
        assert job.watch.finish() != 0
    lost = job.watch.line("host localhost was lost")
    assert "SIGKILL" in lost and "tried again" not in lost
    assert "no rank of world 1 is left" in job.watch.err[-1]
    assert "Remedy" not in job.watch.err[-1]  # Nobody was left to go on.


def test_a_discovery_script_that_fails_at_first_ends_the_job(tmp_path: Path) -> None:
    path = executable(tmp_path / "hosts.sh", "echo no cluster >&2; exit 3")
    done = launch("-np", "1", "--host-discovery-script", str(path), "touch", str(tmp_path / "x"))
    assert done.returncode == 1
    assert "ended with exit code 3 and said: no cluster" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_slot_without_a_device_ends_no_rank_and_is_told_once(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    path = executable(tmp_path / "hosts.sh", f"cat '{slots}'")
    slots.write_text("localhost:2\n")
    words = ("-np", "2", "--min-np", "1", "--max-np", "4", "--gpus-per-rank", "1")
    words += ("--host-discovery-script", str(path))
    with elastic(tmp_path, *words, CUDA_VISIBLE_DEVICES="5,7") as job:
        first = job.watch.world(2)
        (tmp_path / "more").write_text("localhost:4\n")
        (tmp_path / "more").replace(slots)
        why = "--gpus-per-rank 1: the rank with local rank 2 needs device 2 of this host"
        line = job.watch.line("at most from now on")
        assert line.startswith(
            f"hvdlite-run: host localhost is used with 2 slots at most from now on: {why}"
        )
        kill(first[1])
        (alone,) = job.watch.world(1)
        again = job.watch.world(2, epoch=alone.epoch + 1)  # In the slot that has a device.
        assert (alone.pid, again[0].pid, again[1].local) == (first[0].pid, first[0].pid, 1)
        assert job.end() == 0
    assert sum("device 2" in line for line in job.watch.err) == 1, job.watch.err
    assert {place.size for place in job.watch.places()} == {1, 2}


def test_a_host_whose_agent_cannot_be_started_is_done_without(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    path = executable(tmp_path / "hosts.sh", f"while read line; do echo $line; done <'{slots}'")
    slots.write_text("localhost:2\n")
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "python", f"exec '{sys.executable}' \"$@\"")
    words = ("-np", "2", "--min-np", "1", "--max-np", "4", "--host-discovery-script", str(path))
    with elastic(tmp_path, *words, PATH=str(tmp_path / "bin"), forked=()) as job:
        job.watch.world(2)
        (tmp_path / "more").write_text("localhost:2\n192.0.2.7:1\n")
        (tmp_path / "more").replace(slots)
        line = job.watch.line("its agent cannot be started here")
        assert "192.0.2.7" in line and "there is no ssh here: install an ssh client" in line
        assert job.end() == 0
    assert sum("done rank" in line for line in job.watch.out) == 2


@pytest.mark.parametrize(
    ("failure", "code", "why"),
    [
        ("raise ValueError('no data')", 1, r"ValueError: no data \(exit code 1\)"),
        ("os.kill(os.getpid(), 9)", 137, r"killed by SIGKILL \(exit code 137\)"),
    ],
)
def test_the_end_names_rank_host_slot_and_exit_code(failure: str, code: int, why: str) -> None:
    script = (
        f"import os, hvdlite.numpy as hvd\nhvd.init()\nif hvd.rank() == 1: {failure}\nhvd.barrier()"
    )
    done = launch("-np", "2", "--min-np", "1", "-H", "localhost:2", "python", "-c", script)
    last = done.stderr.splitlines()[-1]
    assert re.search(rf"rank 1 \(host localhost\[1\]\) was lost: {why}", last), last
    assert done.returncode == code


def test_a_command_that_is_not_there_ends_the_job() -> None:
    done = launch("-np", "2", "--min-np", "1", "no-such-command")
    assert done.returncode == 2
    assert "the command 'no-such-command': it is not found" in done.stderr


def test_workers_that_never_call_init_are_a_success() -> None:
    words = ("-np", "2", "--min-np", "1")
    done = launch(*words, "python", "-c", "import os; print(os.environ['HVDLITE_RANK'])")
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["[0]<stdout>:0", "[1]<stdout>:1"])


def test_the_variables_tell_a_worker_its_place() -> None:
    script = (
        "import os, hvdlite.numpy as hvd; hvd.init(); "
        "print({k: os.environ[k] for k in sorted(os.environ) if k.startswith('HOROVOD_')}); "
        "print(*(os.environ.get(k) for k in ('HVDLITE_RENDEZVOUS', 'NCCL_SOCKET_IFNAME')))"
    )
    words = ("--as-horovod", "-np", "1", "--min-np", "1", "-H", "localhost:1")
    words += ("--network-interface", "lo")
    done = launch(*words, "python", "-c", script, HOROVOD_RANK="7", HVDLITE_WORKER="9")
    known = {
        "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "CROSS_RANK": "0", "CROSS_SIZE": "1",
        "ELASTIC": "1", "GLOO_IFACE": "lo", "HOSTNAME": "localhost", "LOCAL_RANK": "0",
        "LOCAL_SIZE": "1", "RANK": "0", "SIZE": "1",
    }  # fmt: skip
    expected = {f"HOROVOD_{name}": text for name, text in known.items()}
    assert done.stdout.splitlines() == [f"[0]<stdout>:{expected}", "[0]<stdout>:None lo"]
    assert done.returncode == 0


def test_children_of_a_killed_worker_end_with_it(tmp_path: Path) -> None:
    """As those that load its data do, if they do not look whether it is there."""
    script = (
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print('child', child.pid, os.getpid(), flush=True)\n"
        "time.sleep(1000)\n"
    )
    words = ("-np", "1", "--min-np", "1", "python", "-c", script)
    with start(*words, **{MARK: str(tmp_path)}) as process:
        watch = Watch(process)
        try:
            child, parent = map(int, watch.said(r"child (\d+) (\d+)"))
            os.kill(parent, signal.SIGKILL)
            deadline = time.monotonic() + 20
            while child in processes(str(tmp_path)):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert watch.finish() == 143
        finally:
            watch.close()


def test_workers_that_are_started_again_leave_no_open_file(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "2", "--min-np", "1") as job:
        world = job.watch.world(2)
        counts = []
        for _ in range(4):
            running = processes(str(tmp_path))
            own = [pid for pid, line in running.items() if "hvdlite.launcher" in line]
            assert len(own) == 2  # the launcher, and its agent
            counts.append([len(os.listdir(f"/proc/{pid}/fd")) for pid in sorted(own)])
            kill(world[1])
            world = job.watch.world(2, epoch=world[0].epoch + 1)
        assert counts[1:] == counts[:-1]
        assert job.end() == 0


def test_the_log_of_autotuning_of_each_world_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "tune.csv"
    words = ("-np", "3", "--min-np", "2", "--max-np", "3", "--autotune", "--autotune-log-file")
    tuning = ("--autotune-warmup-samples", "1", "--autotune-steps-per-sample", "1")

    def wait_for_samples(pattern: str) -> list[str]:
        deadline = time.monotonic() + 20
        while True:
            for path in tmp_path.glob(pattern):
                if len(rows := path.read_text().splitlines()) > 1:
                    return rows
            assert time.monotonic() < deadline, pattern
            time.sleep(0.02)

    with elastic(tmp_path, *words, str(log), *tuning) as job:
        first = job.watch.world(3)
        before = wait_for_samples("tune.csv")
        kill(first[2])
        after = wait_for_samples("tune.world*.csv")  # Of two ranks, or three again.
        assert job.end() == 0
    assert after[0] == before[0]
    assert log.read_text().splitlines()[: len(before)] == before
