"""Whole features of hvdlite.torch on devices: the same bits as one process, and no host copy.

All values are small multiples of powers of 2, so that sums are exact in any order and dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from fake_accelerator import FakeLibrary
from fake_accelerator.streams import FakeModule
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from tests.ranks import run_ranks
from tests.torch.accelerators.direct import GLOO, CountingDevice, take_the_way_of_a_device
from tests.torch.accelerators.fakes import ON_HOST, Rank, on_fake, wait_for
from tests.torch.process_group.test_groups import group_of_all

Tensor = torch.Tensor
SIZE, STEPS = 2, 2


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CountingDevice:
    """The device of all tensors, which counts copies to and from the host."""
    found = CountingDevice()
    take_the_way_of_a_device(monkeypatch, found)
    return found


def on_gloo(main: Callable[[int], Any], size: int = SIZE, config: Config = GLOO) -> list[Any]:
    """Run ``main(rank)`` on ranks that know the order of rank 0."""

    def body(rank: int) -> Any:
        current()._agree([], None)
        return main(rank)

    return run_ranks(size, body, config=config)


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            count = torch.arange(parameter.numel()).view(parameter.shape)
            parameter.copy_((count + number) % 3 - 1)
    return model


ROWS = torch.arange(4 * 2 * SIZE).view(2 * SIZE, 4).remainder(3).float() - 1


def step(model: nn.Module, optimizer: Any, rows: Tensor) -> None:
    optimizer.zero_grad()
    (model(rows).sum(1) / len(rows)).sum().backward()
    optimizer.step()


def trained_alone(steps: int = STEPS) -> list[Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(steps):
        step(model, optimizer, ROWS)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"segmentation": "size:60,20,20"},
        {"segmentation": "count:1", "gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "fuse_all_optimizer_ops": True},
        {"fuse_all_reduce_ops": False},
        {"groups": 2},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16, "gradient_as_bucket_view": True},
        {"shard_state": True},
        {"gradient_predivide_factor": 2.0},
    ],
    ids=str,
)
def test_training_has_the_bits_of_one_process(
    options: dict[str, Any], device: CountingDevice
) -> None:
    steps = 1 if "compression" in options else STEPS  # Later gradients do not fit 16 bits.
    expected = trained_alone(steps)

    def main(rank: int) -> list[Tensor]:
        model = make_model()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        plain = torch.optim.SGD(model.parameters(), lr=0.25)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
        for _ in range(steps):
            step(model, optimizer, ROWS[rank::SIZE])
        return [parameter.detach() for parameter in model.parameters()]

    for parameters in on_gloo(main):
        for mine, alone in zip(parameters, expected, strict=True):
            assert torch.equal(mine, alone)
    assert device.staged == 0


def test_gradients_that_are_views_are_reduced_where_they_are(device: CountingDevice) -> None:
    """A segment of views needs no fusion buffer; one of other gradients has one, and keeps it."""

    def main(rank: int, **options: Any) -> int:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.25),
            model.named_parameters(),
            segmentation="count:1",
            **options,
        )
        buffers = current().engine.devices._buffers
        step(model, optimizer, ROWS[rank::SIZE])
        before = {key: buffer.data_ptr() for key, buffer in buffers.items()}
        if options:
            buffers.clear()
        step(model, optimizer, ROWS[rank::SIZE])
        if not options:
            assert {key: buffer.data_ptr() for key, buffer in buffers.items()} == before
        return len(buffers)

    assert on_gloo(lambda rank: main(rank, gradient_as_bucket_view=True)) == [0] * SIZE
    assert on_gloo(main) == [1] * SIZE
    assert device.staged == 0


@pytest.mark.parametrize("exact", [torch.float64, torch.float32])
def test_sync_batch_norm(
    exact: torch.dtype, device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices of some vendors have no float64, in which statistics are exchanged otherwise."""
    if exact is torch.float32:
        monkeypatch.setattr("hvdlite.torch.sync_batch_norm._WITHOUT_FLOAT64", frozenset(("cpu",)))
    dtypes = set()
    finish = device.finish

    def finish_and_note(tensor: Tensor) -> None:
        dtypes.add(tensor.dtype)
        finish(tensor)

    monkeypatch.setattr(device, "finish", finish_and_note)
    batch = torch.arange(24.0).view(6, 4)
    whole = nn.BatchNorm1d(4)
    expected = whole(batch.requires_grad_())
    expected.square().sum().backward()

    def main(rank: int) -> None:
        norm = hvd.SyncBatchNorm(4)
        part = batch.detach()[3 * rank : 3 * rank + 3].clone().requires_grad_()
        output = norm(part)
        output.square().sum().backward()
        torch.testing.assert_close(output, expected[3 * rank : 3 * rank + 3])
        assert batch.grad is not None
        torch.testing.assert_close(part.grad, batch.grad[3 * rank : 3 * rank + 3])
        torch.testing.assert_close(norm.running_var, whole.running_var)

    on_gloo(main)
    assert dtypes == {exact}
    assert device.staged == 0


def test_adasum_is_staged_and_has_the_bits_of_the_host(device: CountingDevice) -> None:
    def main(rank: int) -> list[Tensor]:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.25),
            model.named_parameters(),
            op=hvd.Adasum,
        )
        for _ in range(2):
            step(model, optimizer, ROWS[rank::SIZE])
        return [parameter.detach() for parameter in model.parameters()]

    staged = on_gloo(main)
    assert device.staged > 0
    with pytest.MonkeyPatch.context() as patch:
        take_the_way_of_a_device(patch, CountingDevice("cpu"))
        on_host = run_ranks(SIZE, main)
    for direct, host in zip(staged, on_host, strict=True):
        for one, other in zip(direct, host, strict=True):
            assert torch.equal(one, other)


def test_the_process_group_of_torch(device: CountingDevice) -> None:
    """Every collective of torch.distributed, DDP's too, on tensors of the device."""

    def main(rank: int) -> None:
        group = group_of_all()
        mine = torch.full((3,), rank + 1)
        work = group.allreduce([mine])
        work.wait()
        assert mine.tolist() == [3] * 3
        gathered = [torch.zeros(2, dtype=torch.int16) for _ in range(SIZE)]
        group.allgather([gathered], [torch.full((2,), rank, dtype=torch.int16)]).wait()
        assert [part.tolist() for part in gathered] == [[0, 0], [1, 1]]
        output = torch.zeros(2)
        group.reduce_scatter_single(output, torch.arange(4.0)).wait()
        assert output.tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]
        received = torch.zeros(2)
        group.alltoall_base(received, torch.tensor([rank, rank + 10.0]), [], []).wait()
        assert received.tolist() == [[0.0, 1.0], [10.0, 11.0]][rank]
        told = torch.tensor([rank + 5.0])
        group.broadcast([told], _root(1)).wait()
        assert told.tolist() == [6.0]
        total = torch.tensor([rank + 1.0])
        group.reduce([total], _root(1)).wait()
        assert rank == 0 or total.tolist() == [3.0]
        if rank == 0:
            group.send([torch.tensor([7.0])], 1, 3).wait()
        else:
            message = torch.zeros(1)
            group.recv([message], 0, 3).wait()
            assert message.tolist() == [7.0]
        done = group.allreduce([torch.ones(4)]).get_future()
        assert done.wait()[0].tolist() == [2.0] * 4
        group.shutdown()

    on_gloo(main)
    assert device.staged == 0


def _root(rank: int) -> Any:
    options = torch._C._distributed_c10d.BroadcastOptions()
    options.rootRank = rank
    return options


def test_the_iteration_trace_sees_what_devices_reduce(device: CountingDevice) -> None:
    """Segments end when the device has done them, and each is seen once."""
    nbytes = 4 * sum(parameter.numel() for parameter in make_model().parameters())

    def main(rank: int) -> None:
        model = make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.25)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        with hvd.trace_iterations() as trace:
            for _ in range(STEPS):
                step(model, optimizer, ROWS[rank::SIZE])
            rows = trace.rows()
        assert rows
        for row in rows:
            assert sum(segment.bytes for segment in row.segments) == nbytes
            assert row.segments[0].start >= row.fp_start

    on_gloo(main)
    assert device.staged == 0


def test_communication_begins_before_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer waits in backward until the device has reduced the last layer's gradients."""
    made = [FakeLibrary(), FakeLibrary()]
    device = CountingDevice("fake", FakeModule())
    take_the_way_of_a_device(monkeypatch, device)
    expected = trained_alone()

    def main(here: Rank) -> list[Tensor]:
        model = make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.25)
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), fuse_all_reduce_ops=False
        )
        first, last = model.children()
        before_first = nn.Sequential(first, _Waiting(here.journal), last)
        for _ in range(STEPS):
            here.journal.clear()
            step(before_first, optimizer, ROWS[here.rank :: SIZE])
        return [parameter.detach() for parameter in model.parameters()]

    for parameters in on_fake(main, made, monkeypatch, ON_HOST):
        for mine, alone in zip(parameters, expected, strict=True):
            assert torch.equal(mine, alone)
    assert device.staged == 0


class _Waiting(nn.Module):
    """Passes values on; in backward it waits until something was reduced."""

    def __init__(self, journal: list[str]) -> None:
        super().__init__()
        self._journal = journal

    def forward(self, values: Tensor) -> Tensor:
        def wait(gradient: Tensor) -> None:
            wait_for(lambda: "allreduce done" in self._journal)

        values.register_hook(wait)
        return values


def test_what_is_broadcast_at_the_start(device: CountingDevice) -> None:
    def main(rank: int) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        if rank == 0:
            step(model, optimizer, ROWS)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        alone = make_model()
        plain = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.5)
        for _ in range(2):
            step(alone, plain, ROWS)
        step(model, optimizer, ROWS)
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine, other)
        assert hvd.allgather_object({"rank": rank}) == [{"rank": n} for n in range(SIZE)]
        assert copy.deepcopy(model) is not model

    on_gloo(main)
    assert device.staged == 0
