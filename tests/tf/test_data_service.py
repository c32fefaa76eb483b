"""A TF data service: workers of one job make the elements for another."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from hvdlite.common.connections.prove import Party
from hvdlite.tf.data import compute_worker
from hvdlite.tf.data.compute_service import (
    ComputeClient,
    ComputeService,
    TfDataServiceConfig,
    compute_worker_fn,
    send_to_data_service,
    tf_data_service,
)
from hvdlite.tf.data.meeting import CLIENT, SERVICE
from tests.common.connections.ends import strangers_are_closed
from tests.parallel.jobs import MPIRUN, NO_MPIRUN, environment, mpirun
from tests.ranks import run_ranks

KEY = b"a key of nobody else"
WAIT = 60.0  # seconds, for what comes at once


@contextmanager
def serving(
    dispatchers: int, workers: int, side: str = "compute", timeout: float = WAIT
) -> Iterator[TfDataServiceConfig]:
    """A compute job whose ranks are threads, which has ended afterwards."""
    key = os.urandom(8)
    service = ComputeService(dispatchers, workers, key, host="127.0.0.1")
    config = TfDataServiceConfig(dispatchers, workers, side, service.addresses(), key, timeout)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run_ranks(dispatchers * workers, lambda rank: compute_worker_fn(config))
        except BaseException as error:
            errors.append(error)

    job = threading.Thread(target=work, daemon=True)
    job.start()
    try:
        yield config
        config.compute_client().shutdown()
        job.join(WAIT)
        assert not job.is_alive()
        assert not errors, errors
    finally:
        service.close()


def together(size: int, read: Any) -> list[list[int]]:
    """What each of `size` training ranks gets, all at the same time."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = [int(each) for each in read(rank)]
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    wrong = [each for each in results if not isinstance(each, list)]
    assert not wrong, wrong
    return results


@pytest.mark.parametrize("dispatchers", [1, 2])
def test_ranks_share_a_dataset_or_get_all_of_it(dispatchers: int) -> None:
    dataset = tf.data.Dataset.range(20).map(lambda x: x * x)
    squares = [x * x for x in range(20)]

    def read(rank: int, **options: Any) -> Any:
        return dataset.send_to_data_service(config, rank, 2, **options)

    with serving(dispatchers, 2 // dispatchers) as config:
        for each in together(2, read):
            assert sorted(each) == squares
        shared = together(2, lambda rank: read(rank, reuse_dataset=True))
        if dispatchers == 1:
            assert sorted(shared[0] + shared[1]) == squares
        else:  # each has one of its own
            assert [sorted(each) for each in shared] == [squares] * 2


def test_ranks_get_elements_in_turns() -> None:
    """Of each round one: with two workers, both elements of a round are made by the same one."""
    dataset = tf.data.Dataset.range(10).repeat()

    def read(rank: int) -> Any:
        options: Any = {"processing_mode": "parallel_epochs", "reuse_dataset": True}
        return send_to_data_service(dataset, config, rank, 2, round_robin=True, **options).take(10)

    with serving(1, 2) as config:
        first, second = together(2, read)
    assert [one + 1 for one in first] == second


def test_the_training_side_dispatches() -> None:
    dataset = tf.data.Dataset.range(20)

    def read(rank: int) -> Any:
        with tf_data_service(config, rank) as address:
            distribute = tf.data.experimental.service.distribute(
                "distributed_epoch", address, job_name="job"
            )
            return list(dataset.apply(distribute))

    with serving(1, 2, side="training") as config:
        first, second = together(2, read)
        assert sorted(first + second) == list(range(20))
        with pytest.raises(RuntimeError, match=r"use tf_data_service\(\)"):
            dataset.send_to_data_service(config, 0)


SCRIPT = """
import sys
import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.data.compute_service import TfDataServiceConfig

hvd.init()
config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
dataset = tf.data.Dataset.range(10).send_to_data_service(config, hvd.rank(), hvd.size())
total = hvd.allreduce(sum(int(each) for each in dataset), op=hvd.Sum)
assert int(total) == 45, total
hvd.join()
if hvd.rank() == 0:
    config.compute_client(verbose=2).shutdown()
print("trained")
"""


@pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN)
@pytest.mark.timeout(200)
def test_two_jobs_under_the_name_horovod(tmp_path: Path) -> None:
    """As Horovod's users start them; the training job ends the other, which leaves no file."""
    file, script = tmp_path / "service.json", tmp_path / "train.py"
    script.write_text(SCRIPT)
    module = [sys.executable, "-m", "hvdlite.as_horovod"]
    worker = [*module, "-m", "horovod.tensorflow.data.compute_worker", str(file)]
    commands = [mpirun(2, *worker), mpirun(1, *module, str(script), str(file))]
    jobs = [
        subprocess.Popen(
            command, env=environment(TF_CPP_MIN_LOG_LEVEL="2"), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )
        for command in commands
    ]  # fmt: skip
    try:
        trained = jobs[1].communicate(timeout=180)[0]
        assert jobs[1].returncode == 0, trained
        assert trained.count("trained") == 1
        served = jobs[0].communicate(timeout=WAIT)[0]
        assert jobs[0].returncode == 0, served
        assert not file.exists()
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


def test_the_file_is_private_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    config = TfDataServiceConfig(2, 3, "training", {"lo": [("127.0.0.1", 5)]}, b"\xff\x00k", 7.5)
    assert TfDataServiceConfig.from_dict(config.to_dict()) == config
    reader: list[Any] = []
    wait = threading.Thread(
        target=lambda: reader.append(TfDataServiceConfig.read(str(path), True)), daemon=True
    )
    wait.start()
    config.write(str(path))
    wait.join(WAIT)
    assert reader == [config]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["service.json"]
    config.write(str(path))
    with pytest.raises(FileNotFoundError):
        TfDataServiceConfig.read(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="dispatcher_side='both'"):
        TfDataServiceConfig(1, 1, "both", {}, b"")


def test_who_does_not_come_is_named_after_the_timeout() -> None:
    service = ComputeService(2, 2, KEY, host="127.0.0.1")
    client = ComputeClient(service.addresses(), KEY)
    with pytest.raises(TimeoutError, match=r"dispatcher 1 has not registered within 0.1 s"):
        client.wait_for_dispatcher_registration(1, 0.1)
    client.register_worker_for_dispatcher(0, 5)
    with pytest.raises(TimeoutError, match=r"1 of the 2 workers of dispatcher 0"):
        client.wait_for_dispatcher_worker_registration(0, 0.1)
    client.register_worker_for_dispatcher(0, 6)
    client.wait_for_dispatcher_worker_registration(0, 0.1)
    client.register_dispatcher(0, "grpc://here:1")
    client.register_dispatcher(0, "grpc://here:1")
    assert client.wait_for_dispatcher_registration(0, 0.1) == "grpc://here:1"
    with pytest.raises(ValueError, match=r"at grpc://here:1 already.*grpc://there:1"):
        client.register_dispatcher(0, "grpc://there:1")
    with pytest.raises(IndexError, match="no dispatcher 2: the data service has 2"):
        client.register_dispatcher(2, "grpc://here:1")
    service.close()
    with pytest.raises(ValueError, match="workers_per_dispatcher=0"):
        ComputeService(1, 0, KEY)


def test_nobody_without_the_key_is_answered() -> None:
    service = ComputeService(1, 1, KEY)
    addresses = service.addresses()
    with pytest.raises(ConnectionError, match=r"cannot be reached at .*has another secret"):
        ComputeClient(addresses, b"another").register_dispatcher(0, "grpc://evil:1")
    honest = ComputeClient(addresses, KEY)
    with pytest.raises(TimeoutError):
        honest.wait_for_dispatcher_registration(0, 0.0)
    waiting = threading.Thread(target=honest.wait_for_shutdown, daemon=True)
    waiting.start()
    service.close()
    waiting.join(WAIT)
    assert not waiting.is_alive()
    honest.shutdown()  # nothing happens any more
    honest.wait_for_shutdown()


def test_strangers_are_closed_while_a_member_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.common.connections.service.STRANGER_SECONDS", 0.3)
    service = ComputeService(1, 1, KEY, host="127.0.0.1")
    [[address]] = service.addresses().values()
    client = ComputeClient(service.addresses(), KEY)
    found: list[str] = []
    waiting = threading.Thread(
        target=lambda: found.append(client.wait_for_dispatcher_registration(0, WAIT)), daemon=True
    )
    waiting.start()
    strangers_are_closed(address, Party(b"a guess", CLIENT, SERVICE))
    client.register_dispatcher(0, "grpc://here:1")
    waiting.join(WAIT)
    assert found == ["grpc://here:1"]
    service.close()


def test_the_service_is_reached_at_the_wanted_addresses_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HVDLITE_NETWORK_INTERFACES", "lo")
    service = ComputeService(1, 1, KEY)
    addresses = service.addresses()
    assert addresses["lo"][0][0] == "127.0.0.1" and len(addresses) == 1
    with pytest.raises(ConnectionRefusedError):  # All of 127/8 is this host.
        socket.create_connection(("127.0.0.2", addresses["lo"][0][1]), WAIT)
    service.close()


def test_a_compute_job_of_another_size() -> None:
    config = TfDataServiceConfig(2, 2, "compute", {}, KEY)

    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"3 ranks.*2 dispatchers x 2 workers"):
            compute_worker_fn(config)
        with pytest.raises(ValueError, match="--dispatchers 2: the 3 ranks"):
            compute_worker.main(2, "compute", "never written", 1.0)

    run_ranks(3, main)


def test_the_command_line() -> None:
    given = compute_worker.parse(["file", "--dispatchers", "2", "--dispatcher-side", "training"])
    assert vars(given) == {
        "configfile": "file", "dispatchers": 2, "dispatcher_side": "training", "timeout": 60.0,
    }  # fmt: skip
