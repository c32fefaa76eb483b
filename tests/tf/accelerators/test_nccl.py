"""Tensors of TensorFlow on hvdlite's own binding to NCCL, by the compiled stand-in.

Tensors are on the CPU, whose memory is that of the stand-in's devices.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.kernels import get_registered_kernels_for_op

import hvdlite.tf as hvd
from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.devices import libraries
from hvdlite.common.devices.nccl.binding import Nccl
from hvdlite.common.devices.nccl.communicator import NcclCommunicator
from hvdlite.common.devices.nccl.context import CudaContext
from hvdlite.common.devices.nccl.cudart import CudaRuntime
from hvdlite.common.engine.engine import Engine
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from hvdlite.tf.accelerators import library as gpu_library
from hvdlite.tf.accelerators.library import (
    Accelerator,
    TensorFlowFramework,
    TensorFlowLibrary,
    accelerator_of,
)
from hvdlite.tf.native.loader import library
from hvdlite.tools import trials
from tests.common.devices.nccl.fake import Fake
from tests.elastic_job import ElasticJob, Worker
from tests.ranks import run_ranks
from tests.tf.test_native import PATHS, SETTING, needs_compiler

pytestmark = pytest.mark.timeout(240)  # The first use may have to compile.


class Framework(TensorFlowFramework):
    """Each rank, a thread, has a device of its own."""

    def context(self, device: Any, local_rank: int) -> CudaContext:
        return super().context(local_rank, local_rank)


def use_nccl(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU be the device of all ranks that begin now."""
    cuda = CudaRuntime(fake.path)
    stream = CudaContext(cuda, 0).new_stream()

    def provider() -> TensorFlowLibrary:
        made = TensorFlowLibrary(Nccl(fake.path), Framework(cuda))
        made.accelerator.stream_of_host = stream
        return made

    for name, made in (("nccl:tensorflow", provider), ("nccl", lambda: None)):
        registered = libraries._Registered(made, by_name_only=False)
        monkeypatch.setitem(libraries._registered, name, registered)
    monkeypatch.setattr(gpu_library, "DEVICE_TYPE", "CPU")


def on_nccl(
    fake: Fake,
    main: Callable[[int, Accelerator], Any],
    monkeypatch: pytest.MonkeyPatch,
    size: int = 2,
) -> list[Any]:
    """Run ``main(rank, accelerator)`` on every rank, where the CPU is the device; the results."""
    use_nccl(fake, monkeypatch)

    def body(rank: int) -> Any:
        current()._agree([], None)
        accelerator = accelerator_of(current())
        assert accelerator is not None
        engines.append(current().engine)
        return main(rank, accelerator)

    engines: list[Engine] = []
    results = run_ranks(size, body, config=Config(devices="nccl"))
    for engine in engines:
        engine.join()  # It leaves nothing behind that the next test would find.
    return results


def test_eager_collectives_stay_on_the_device(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(rank: int, accelerator: Accelerator) -> None:
        mine = np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * rank
        both = [np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * each for each in range(2)]
        given = tf.constant(mine)
        np.testing.assert_array_equal(hvd.allreduce(given), (both[0] + both[1]) / 2)
        np.testing.assert_array_equal(hvd.allreduce(given, op=hvd.Max), both[1])
        one, two = hvd.grouped_allreduce([given, tf.ones(3)], op=hvd.Sum, prescale_factor=0.5)
        np.testing.assert_array_equal(one, (both[0] + both[1]) / 2)
        np.testing.assert_array_equal(two, [1, 1, 1])
        np.testing.assert_array_equal(hvd.broadcast(given, 1), both[1])
        rows = tf.fill([rank + 1, 2], float(rank))
        np.testing.assert_array_equal(hvd.allgather(rows), [[0, 0], [1, 1], [1, 1]])
        np.testing.assert_array_equal(
            hvd.reducescatter(given, op=hvd.Sum), (both[0] + both[1])[[rank]]
        )
        sent, splits = hvd.alltoall(tf.range(3, dtype=tf.int64) + 10 * rank, [1, 2])
        np.testing.assert_array_equal(sent, [0, 10] if rank == 0 else [1, 2, 11, 12])
        np.testing.assert_array_equal(splits, [1, 1] if rank == 0 else [2, 2])
        np.testing.assert_array_equal(given, mine)
        assert hvd.allreduce(tf.constant(3.0 + rank), op=hvd.Sum).numpy() == 7
        assert hvd.allreduce(tf.zeros([0, 2])).shape == (0, 2)
        assert accelerator.copied_bytes == 0

    on_nccl(fake, main, monkeypatch)
    assert {line.split()[0] for line in fake.journal} >= {
        "allreduce", "broadcast", "allgather", "reducescatter", "alltoall"
    }  # fmt: skip


@needs_compiler
def test_the_kernels_for_gpus_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "on")
    assert library() is not None
    for name, on_host in (("HvdliteStart", "ticket"), ("HvdliteTake", "tickets")):
        kernels = get_registered_kernels_for_op(name).kernel
        found = {each.device_type: list(each.host_memory_arg) for each in kernels}
        assert found == {"CPU": [], "GPU": [on_host]}


@pytest.mark.parametrize("path", PATHS)
def test_graphs_reduce_on_the_device(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv(SETTING, path)

    def main(rank: int, accelerator: Accelerator) -> None:
        variable = tf.Variable([1.0, 2.0])

        @tf.function
        def step(given: Any) -> Any:
            made = given + 1
            group = hvd.grouped_allreduce([given, given * 2], op=hvd.Sum)
            return [
                hvd.allreduce(variable, op=hvd.Sum), hvd.allreduce(made), *group,
                hvd.broadcast(given, 1), hvd.allgather(given), made,
                hvd.reducescatter(given, op=hvd.Sum), hvd.allgather(given[: rank + 1]),
                hvd.alltoall(given),
            ]  # fmt: skip

        for turn in range(2):
            mine, others = (np.array([each, turn], np.float32) for each in (rank, 1 - rank))
            results = [each.numpy().tolist() for each in step(tf.constant(mine))]
            total = (mine + others).tolist()
            assert results == [
                [2, 4], [total[0] / 2 + 1, turn + 1], total, [2 * each for each in total],
                [1, turn], [0, turn, 1, turn], [rank + 1, turn + 1],
                [total[rank]], [0, 1, turn], [0, 1] if rank == 0 else [turn, turn],
            ]  # fmt: skip
            assert variable.numpy().tolist() == [1, 2]
        assert (accelerator.copied_bytes == 0) == (path == "on")

    on_nccl(fake, main, monkeypatch)
    kinds = {line.split()[0] for line in fake.journal}
    assert kinds >= {"allreduce", "broadcast", "allgather", "reducescatter", "alltoall"}


@needs_compiler
def test_the_device_waits_for_what_the_graph_computes(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, "on")
    queued = threading.Semaphore(0)
    allreduce = NcclCommunicator.allreduce

    def noted(self: Any, *arguments: Any) -> None:
        allreduce(self, *arguments)
        queued.release()

    monkeypatch.setattr(NcclCommunicator, "allreduce", noted)
    begun: list[int] = []

    def release_later(stream: int) -> None:
        for _ in range(2):
            assert queued.acquire(timeout=30)
        threading.Event().wait(0.05)  # It would have begun, if nothing held it.
        begun.append(sum(line.startswith("allreduce") for line in fake.journal))
        fake.c.fake_release(stream)

    def main(rank: int, accelerator: Accelerator) -> None:
        step = tf.function(lambda given: hvd.allreduce(given * 2, op=hvd.Sum))
        hvd.barrier()
        if rank == 0:
            fake.c.fake_hold(accelerator.stream_of_host)
            threading.Thread(target=release_later, args=(accelerator.stream_of_host,)).start()
        hvd.barrier()
        assert step(tf.constant([1.0 + rank])).numpy().tolist() == [6]

    on_nccl(fake, main, monkeypatch)
    assert begun == [0]
    assert "allreduce done 0" in fake.journal


@pytest.mark.parametrize("path", PATHS)
def test_training_in_a_graph_equals_one_process(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv(SETTING, path)
    rows = np.random.default_rng(3).normal(size=(4, 8, 3)).astype(np.float32)
    wanted = np.array([[1], [-2], [3]], np.float32)

    def gradient(batch: Any, weights: Any) -> Any:
        return 2 * batch.T @ (batch @ weights - batch @ wanted) / len(batch)

    def main(rank: int, accelerator: Accelerator) -> Any:
        weights, bias = tf.Variable(tf.zeros([3, 1])), tf.Variable(0.5)
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))

        @tf.function
        def step(batch: Any) -> None:
            with tf.GradientTape() as tape:
                error = batch @ weights - batch @ wanted
                loss = tf.reduce_mean(tf.reduce_sum(error**2, 1)) + bias**2
            variables = [weights, bias]
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        for batch in rows:
            step(tf.constant(batch[rank::2]))
        assert (accelerator.copied_bytes == 0) == (path == "on")
        return weights.numpy(), bias.numpy()

    results = on_nccl(fake, main, monkeypatch)
    weights = np.zeros((3, 1), np.float32)
    for batch in rows:
        weights -= 0.1 * gradient(batch, weights)
    for found, bias in results:
        np.testing.assert_allclose(found, weights, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(bias, 0.5 * 0.8**4, rtol=1e-6)
    assert "allreduce 0" in fake.journal


@pytest.mark.parametrize("path", PATHS)
def test_keras_fits_on_the_device(fake: Fake, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    if tf.keras.__version__.startswith("2.") or tf.keras.backend.backend() != "tensorflow":
        pytest.skip("Keras 3 does not run on TensorFlow here")
    from hvdlite.keras import DistributedOptimizer
    from tests.keras.training import assert_close, assert_same, fit, fit_alone, make_model, sgd

    monkeypatch.setenv(SETTING, path)

    def main(rank: int, accelerator: Accelerator) -> Any:
        weights = fit(make_model(), DistributedOptimizer(sgd()), rank, 2)
        assert (accelerator.copied_bytes == 0) == (path == "on")
        return weights

    results = on_nccl(fake, main, monkeypatch)
    assert_same(results)
    assert_close(results[0], fit_alone(sgd))
    assert "allreduce done 0" in fake.journal


@pytest.mark.parametrize("path", PATHS)
def test_each_world_of_an_elastic_job_connects_anew(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """One function, traced once, trains in worlds of three ranks, of two, and of three again."""
    monkeypatch.setenv(SETTING, path)
    use_nccl(fake, monkeypatch)
    job = ElasticJob(3, Config(devices="nccl"))

    def main(worker: Worker) -> Any:
        weights = tf.Variable(tf.zeros(2, tf.float64))

        @tf.function
        def step(factor: tf.Tensor) -> None:
            gradient = tf.ones(2, tf.float64) * factor
            weights.assign_sub(0.1 * hvd.allreduce(gradient, name="gradient"))

        @hvd.elastic.run
        def train(state: Any) -> Any:
            current()._agree([], None)
            accelerator = accelerator_of(current())
            assert accelerator is not None
            before = accelerator.copied_bytes
            while state.step < 6:
                if (worker.number, state.step) == (1, 2):
                    worker.die()
                if (worker.number, state.step) == (0, 4) and len(job.workers) == 3:
                    job.add(main)
                step(tf.constant(float(hvd.rank() + 1), tf.float64))
                assert (accelerator.copied_bytes == before) == (path == "on")
                state.history = [*state.history, hvd.size()]
                state.step += 1
                state.commit()
            return weights.numpy(), state.history

        return train(hvd.elastic.TensorFlowState([weights], step=0, history=[]))

    results = [result for result in job.run(main) if result is not None]
    assert len(results) == 3
    for weights, history in results:
        assert history == results[0][1]
        mean = sum(np.mean(np.arange(size) + 1) for size in history)
        np.testing.assert_allclose(weights, -0.1 * mean * np.ones(2))
    assert set(results[0][1]) == {2, 3}
    connected = Counter(line for line in fake.journal if line.startswith("connect 0 of"))
    assert connected["connect 0 of 2 device 0"] >= 1
    assert connected["connect 0 of 3 device 0"] >= 2


@needs_compiler
def test_gradients_of_embeddings_stay_on_the_device(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, "on")

    def main(rank: int, accelerator: Accelerator) -> None:
        table = tf.Variable(tf.zeros([4, 2]))

        @tf.function
        def step(rows: Any) -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(tf.gather(table, rows)) * (rank + 1.0)
            return tf.convert_to_tensor(tape.gradient(loss, table))

        found = step(tf.constant([rank, rank, 3][: 2 + rank], tf.int64))
        wanted = np.array([[1, 1], [2, 2], [0, 0], [1, 1]])  # Two of 1/2; two and one of 2/2.
        np.testing.assert_array_equal(found, wanted)
        assert accelerator.copied_bytes == 0

    on_nccl(fake, main, monkeypatch)
    assert "allgather 0" in fake.journal


@pytest.mark.parametrize("path", ["eager", *PATHS])
def test_a_failure_of_nccl_is_an_error_of_the_call(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv(SETTING, "off" if path == "eager" else path)
    fake.c.fake_fail(1, 2, 6)

    def main(rank: int, accelerator: Accelerator) -> None:
        call = hvd.allreduce if path == "eager" else tf.function(hvd.allreduce)
        assert call(tf.ones(2)).numpy().tolist() == [1, 1]
        with pytest.raises(tf.errors.UnknownError, match=r"rank 1: .*code 6"):
            call(tf.ones(2))
        with pytest.raises(HorovodInternalError, match=r"rank 1: .*code 6"):
            hvd.allreduce(tf.ones(2))

    on_nccl(fake, main, monkeypatch)


def test_the_name_of_a_library_stands_for_those_of_all_frameworks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libraries, "installed_plug_ins", lambda: ())
    made: dict[str, Any] = {name: object() for name in ("a", "a:other", "b")}
    monkeypatch.setattr(
        libraries,
        "_registered",
        {
            name: libraries._Registered(lambda each=each: each, by_name_only=name == "a")
            for name, each in made.items()
        },
    )
    assert libraries.find_libraries("a") == [made["a"], made["a:other"]]
    assert libraries.find_libraries("a:other") == [made["a:other"]]
    assert libraries.find_libraries("auto") == [made["a:other"], made["b"]]
    with pytest.raises(ConfigError, match="these are: a, a:other, auto, b, off"):
        libraries.find_libraries("other")


@pytest.mark.parametrize("path", PATHS)
def test_what_nccl_lacks_is_staged(fake: Fake, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv(SETTING, path)

    def main(rank: int, accelerator: Accelerator) -> None:
        mine = tf.constant([rank + 1, 5], tf.int64)
        assert hvd.allreduce(mine).numpy().tolist() == [1, 5]  # An average of integers.
        assert accelerator.copied_bytes == 4 * 8
        step = tf.function(hvd.allreduce)
        assert step(mine).numpy().tolist() == [1, 5]
        copied = accelerator.copied_bytes
        assert copied > 4 * 8
        flags = hvd.allgather(tf.constant([rank == 0]))  # No dtype of NCCL: on the host as ever.
        assert flags.numpy().tolist() == [True, False]
        assert accelerator.copied_bytes == copied

    on_nccl(fake, main, monkeypatch)
    assert not any(line.startswith("allreduce") for line in fake.journal)


def test_the_trial_says_what_was_found(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> tuple[int, str]:
        return trials.main("tensorflow_devices"), capsys.readouterr().out

    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: False)
    assert said() == (1, f"TensorFlow {tf.version.VERSION} was built without CUDA\n")
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    assert said() == (1, f"TensorFlow {tf.version.VERSION} sees no GPU\n")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind] * 4)
    monkeypatch.setenv("HVDLITE_CUDART_LIBRARY", fake.path)
    monkeypatch.setenv("HVDLITE_NCCL_LIBRARY", "/none/libnccl.so.2")
    status, text = said()
    assert status == 1 and text.startswith("HVDLITE_NCCL_LIBRARY=/none/libnccl.so.2: ")
    monkeypatch.setenv("HVDLITE_NCCL_LIBRARY", fake.path)
    assert said() == (0, f"NCCL 2.27.3 ({fake.path}) for 4 of gpu\n")
