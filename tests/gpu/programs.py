"""What one rank of a test on GPUs runs: ``python -m tests.gpu.programs NAME [DEVICE]``.

The oracle is numpy, or the same training in one process. Values are small multiples of powers of 2,
so that sums are exact. Ends with "rank N: NAME is right".
"""

from __future__ import annotations

import copy
import faulthandler
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def sums(device: str) -> None:
    """Reduce tensors of PyTorch, alone and as a group, and gather; nothing goes by the host."""
    import torch

    import hvdlite.torch as hvd
    from hvdlite.torch.devices import StagedDevice

    staged = _counted(StagedDevice, "staging")
    rank, size, place = _begin(hvd, device)
    given = [np.arange(6, dtype=np.int64).reshape(2, 3) * (each + 1) for each in range(size)]
    total = np.sum(given, axis=0)
    for name in ("float32", "float64", "int32", "int64", "float16", "bfloat16"):
        dtype = getattr(torch, name)
        mine = torch.tensor(given[rank], device=place, dtype=dtype)
        both = hvd.grouped_allreduce([mine, mine * 2], op=hvd.Sum)
        for result, times in zip(both, (1, 2), strict=True):
            np.testing.assert_array_equal(result.double().cpu().numpy(), total * times)
        gathered = hvd.allgather(mine)
        np.testing.assert_array_equal(gathered.double().cpu().numpy(), np.concatenate(given))
        last = hvd.broadcast(mine, size - 1)
        np.testing.assert_array_equal(last.double().cpu().numpy(), given[-1])
    many = torch.ones(1 << 22, device=place)
    for _ in range(20):  # Each waits on its stream for the one before.
        many = hvd.allreduce(many, op=hvd.Average, name="many") + 1
    assert bool((many == 21).all())
    assert not staged, f"{len(staged)} copies to the host"


def training(device: str) -> None:
    """Train on the rows of this rank, beside one process that has them all."""
    import torch
    from torch import nn

    import hvdlite.torch as hvd
    from hvdlite.torch.devices import StagedDevice

    rank, size, place = _begin(hvd, device)
    torch.manual_seed(7)
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double().to(place)
    model = copy.deepcopy(alone)
    staged = _counted(StagedDevice, "staging")
    made = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (alone, model)]
    made[1] = hvd.DistributedOptimizer(made[1], model.named_parameters())
    for step in range(5):
        rows = torch.randn(4 * size, 4, generator=torch.Generator().manual_seed(step)).double()
        for each, optimizer, some in ((alone, made[0], rows), (model, made[1], rows[rank::size])):
            optimizer.zero_grad()
            each(some.to(place)).square().mean().backward()
            optimizer.step()
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert not staged, f"{len(staged)} copies to the host"


def graph(device: str) -> None:
    """Replay a CUDA graph with an allreduce."""
    import torch

    import hvdlite.torch as hvd
    from hvdlite.torch.accelerators.graphs import GraphCollectives

    rank, size, place = _begin(hvd, device)
    collectives = GraphCollectives(device=place)
    tensor = torch.zeros(1000, device=place)
    stream = torch.cuda.Stream(place)
    with torch.cuda.stream(stream):
        collectives.allreduce_(tensor, hvd.Sum)  # Before a capture everything has run once.
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, stream=stream):
        tensor.add_(rank + 1)
        collectives.allreduce_(tensor, hvd.Sum)
    expected = 0
    for _ in range(3):
        recorded.replay()
        expected = expected * size + size * (size + 1) // 2
    torch.cuda.synchronize()
    assert bool((tensor == expected).all()), (tensor[0].item(), expected)
    collectives.check()
    hvd.barrier()
    del recorded  # NCCL waits in `close` for graphs that have recorded something of it.
    collectives.close()


def tensorflow(device: str) -> None:
    """Reduce eagerly, in a graph and by an optimizer of Keras."""
    import tensorflow as tf

    import hvdlite.tf as hvd
    from hvdlite.common.runtime.current import current
    from hvdlite.tf.accelerators.library import accelerator_of

    for each in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(each, True)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    accelerator = accelerator_of(current())
    assert accelerator is not None, "TensorFlow finds no NCCL, or no GPU"
    with tf.device("GPU:0"):
        mine = tf.range(6, dtype=tf.float32) * (rank + 1.0)
        total = np.arange(6) * size * (size + 1) / 2
        np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum), total)
        gathered = hvd.allgather(mine[: rank + 1])
        assert gathered.shape == (size * (size + 1) // 2,)
        step = tf.function(lambda given: hvd.allreduce(given * 2, op=hvd.Sum))
        for _ in range(3):
            np.testing.assert_array_equal(step(mine), 2 * total)
        weights = tf.Variable([2.0, 3.0])
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.5))

        @tf.function
        def train() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights) * (rank + 1.0)
            gradients = tape.gradient(loss, [weights])
            optimizer.apply_gradients(zip(gradients, [weights], strict=True))

        train()
        expected = np.array([2.0, 3.0]) - 0.5 * (size + 1) / 2
        np.testing.assert_array_equal(weights, expected)
    assert not accelerator.copied_bytes, f"{accelerator.copied_bytes} bytes went by the host"


def _begin(hvd: Any, device: str) -> tuple[int, int, Any]:
    import torch

    hvd.init()
    place = torch.device(device)
    if device == "cuda":
        place = torch.device(device, hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(place)
    return hvd.rank(), hvd.size(), place


def _counted(owner: Any, name: str) -> list[Any]:
    """Return a list that grows with each call of a method."""
    calls: list[Any] = []
    method = getattr(owner, name)

    def counting(self: Any, *arguments: Any) -> Any:
        calls.append(name)
        return method(self, *arguments)

    setattr(owner, name, counting)
    return calls


PROGRAMS: dict[str, Callable[[str], None]] = {
    each.__name__: each for each in (sums, training, graph, tensorflow)
}


def main() -> None:
    import hvdlite.numpy

    faulthandler.dump_traceback_later(45)  # Before the test ends what hangs.
    name = sys.argv[1]
    PROGRAMS[name](sys.argv[2])
    print(f"rank {hvdlite.numpy.rank()}: {name} is right", flush=True)


if __name__ == "__main__":
    main()
