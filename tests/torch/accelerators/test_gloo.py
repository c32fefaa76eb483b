"""The way of an accelerator with gloo on the CPU: every collective, without a copy to the host."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.api.forms import Forms
from hvdlite.common.base.topology import Topology
from hvdlite.common.devices import libraries
from hvdlite.common.runtime.current import current, use
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.settings.config import Config
from hvdlite.torch.accelerators import c10d
from hvdlite.torch.accelerators.context import HostContext, HostStreams
from hvdlite.torch.accelerators.graphs import GraphCollectives
from hvdlite.torch.adapter import TorchAdapter
from hvdlite.torch.autograd import TorchRunner
from hvdlite.torch.devices import HOST_AS_DEVICE
from hvdlite.torch.mpi_ops import forms as hvd_forms
from tests.ranks import run_ranks, run_threads
from tests.torch.accelerators.direct import GLOO, CountingDevice, on_devices
from tests.torch.accelerators.fakes import wait_for
from tests.worlds import IN_PROCESS, make_world

Tensor = torch.Tensor


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, torch.float32), (2, torch.int64), (3, torch.float32), (3, torch.bfloat16)],
)
def test_every_collective_stays_on_the_device(size: int, dtype: torch.dtype) -> None:
    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> None:
        def same(result: Tensor, expected: list[object]) -> None:
            assert torch.equal(result, torch.tensor(expected).to(dtype))

        rows = [[rank + 1, row] for row in range(rank + 1)]  # As many rows as rank + 1.
        total = sum(range(1, size + 1))
        row = torch.tensor([rank + 1, 5]).to(dtype)
        same(forms.allreduce(row, op=hvd.Sum), [total, 5 * size])
        assert row.tolist() == [rank + 1, 5]
        same(forms.allreduce_(row.clone(), op=hvd.Max), [size, 5])
        gathered = forms.allgather(torch.tensor(rows).to(dtype))
        same(gathered, [[r + 1, row] for r in range(size) for row in range(r + 1)])
        same(forms.allgather(row), [x for r in range(size) for x in (r + 1, 5)])
        same(forms.broadcast(row, size - 1), [size, 5])
        parts = torch.arange(2 * size + 1).to(dtype)  # The first rank gets a row more.
        mine = forms.reducescatter(parts, op=hvd.Sum)
        whole = [size * value for value in range(2 * size + 1)]
        same(mine, whole[:3] if rank == 0 else whole[2 * rank + 1 : 2 * rank + 3])
        same(forms.reducescatter(parts[: 2 * size], op=hvd.Sum), whole[2 * rank : 2 * rank + 2])
        sent = torch.tensor([[rank, to] for to in range(size) for _ in range(to)]).to(dtype)
        received, splits = forms.alltoall(
            sent.reshape(-1, 2), torch.tensor(range(size), dtype=torch.int32)
        )
        assert received.tolist() == [[r, rank] for r in range(size) for _ in range(rank)]
        assert splits.tolist() == [rank] * size
        group = [torch.full((n, 2), rank + n).to(dtype) for n in (1, 0, 3)]
        for result, n in zip(forms.grouped_allreduce(group, op=hvd.Sum), (1, 0, 3), strict=True):
            expected = sum(r + n for r in range(size))
            assert torch.equal(result, torch.full((n, 2), expected).to(dtype))
        matrix = torch.zeros(2, 2, dtype=dtype)
        matrix[:, 0] = row
        forms.broadcast_(matrix[:, 0], 0)  # Not contiguous.
        assert matrix.tolist() == [[1, 0], [5, 0]]
        assert device.staged == 0

    on_devices(size, main)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (hvd.Sum, torch.uint8), (hvd.Min, torch.int32), (hvd.Max, torch.int64),
        (hvd.Product, torch.uint8), (hvd.Sum, torch.int64),
    ],
)  # fmt: skip
def test_integers_have_the_bits_of_the_host(op: hvd.ReduceOp, dtype: torch.dtype) -> None:
    values = [torch.randint(0, 100, (n,), dtype=dtype) for n in (1, 1000, 77)]

    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> list[Tensor]:
        own = [value * (rank + 1) for value in values]
        reduced = forms.grouped_allreduce(own, op=op)
        return [*reduced, forms.reducescatter(own[1], op=op)]

    def on_host(rank: int) -> list[Tensor]:
        return main(rank, hvd_forms, CountingDevice())

    for direct, host in zip(on_devices(3, main), run_ranks(3, on_host), strict=True):
        for one, other in zip(direct, host, strict=True):
            assert torch.equal(one, other)


def test_factors_and_averages() -> None:
    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> None:
        tensor = torch.full((3,), rank + 1.0)
        assert forms.allreduce(tensor, op=hvd.Average).tolist() == [1.5] * 3
        scaled = forms.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
        assert scaled.tolist() == [3.0] * 3
        assert tensor.tolist() == [rank + 1.0] * 3
        parts = forms.reducescatter(torch.full((4,), rank + 1.0), op=hvd.Average)
        assert parts.tolist() == [1.5, 1.5]
        assert device.staged == 0

    on_devices(2, main)


def test_what_the_library_lacks_is_staged() -> None:
    """16-bit integers, sums of bool, averages of integers, and Adasum are not gloo's."""

    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> None:
        short = torch.full((2,), rank + 1, dtype=torch.int16)
        assert forms.allreduce(short, op=hvd.Sum).tolist() == [3, 3]
        assert device.staged == 2, "one copy to the host, and one back"
        assert forms.allreduce(torch.tensor([rank == 0]), op=hvd.Sum).tolist() == [True]
        assert forms.allreduce(torch.tensor([2 * rank]), op=hvd.Average).tolist() == [1]
        assert device.staged == 6
        assert forms.broadcast(short, 1).tolist() == [2, 2], "bytes are moved, whatever they mean"
        assert device.staged == 6
        assert forms.allreduce(torch.ones(2), op=hvd.Adasum).tolist() == [1.0, 1.0]
        assert device.staged == 8

    on_devices(2, main)


def test_a_rank_without_the_library_lets_all_be_staged() -> None:
    def body(rank: int) -> None:
        config = GLOO if rank else Config()
        topology = Topology.single_host(2)
        runtime = Runtime(world.transport(rank), config)
        device = CountingDevice()
        forms = Forms(TorchRunner(TorchAdapter(lambda kind: device)))
        try:
            with use(runtime):
                assert forms.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
                assert device.staged == 2, topology
        finally:
            runtime.shutdown()

    world = make_world(IN_PROCESS, Topology.single_host(2))
    run_threads(2, body)


def test_process_sets_and_joined_ranks() -> None:
    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> None:
        pair = hvd.add_process_set([0, 2])
        if rank != 1:
            total = forms.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=pair)
            assert total.tolist() == [2]
        if rank != 2:
            for op, expected in ((hvd.Sum, 3), (hvd.Max, 2), (hvd.Product, 2)):
                tensor = torch.full((2,), rank + 1)
                assert forms.allreduce(tensor, op=op).tolist() == [expected] * 2
            assert forms.allgather(torch.tensor([rank])).tolist() == [0, 1]
        forms.join()
        assert device.staged == 0

    on_devices(3, main)


def test_a_tensor_that_does_not_fit_fails_alone() -> None:
    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> None:
        with pytest.raises(hvd.HorovodInternalError, match="ranks disagree on shape"):
            forms.allreduce(torch.ones(rank + 1), name="x")
        assert forms.allreduce(torch.ones(1), name="x", op=hvd.Sum).tolist() == [2.0]

    on_devices(2, main)


def test_operations_that_a_group_lacks_are_refused_and_spoil_nothing() -> None:
    def main(rank: int) -> None:
        library = c10d.of_host()
        assert library is not None
        collectives = GraphCollectives(library=library, streams=HostStreams())
        with pytest.raises(ValueError, match="c10d:gloo does not run allreduce of float32"):
            collectives.allreduce_(torch.ones(2), hvd.Adasum)
        with pytest.raises(ValueError, match="does not run reducescatter of float32 with"):
            collectives.reducescatter_into(torch.ones(1), torch.ones(2), hvd.Average)
        assert collectives.allreduce_(torch.ones(2), hvd.Sum).tolist() == [2.0, 2.0]
        collectives.close()

    run_ranks(2, main)


def refuse(store: Any, rank: int, size: int, timeout: Any) -> Any:
    if rank == 0:
        raise RuntimeError("no link")
    store.wait(["what rank 0 sets"])


@pytest.mark.parametrize("shares", [True, False])
def test_ranks_that_are_not_connected_leave_no_store_behind(
    shares: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 fails, and the other one hears of it at once; or they use one device."""
    library = c10d.C10dLibrary(HOST_AS_DEVICE, c10d.GLOO, refuse)
    library.shares_devices = shares
    registered = libraries._Registered(lambda: library, by_name_only=True)
    monkeypatch.setitem(libraries._registered, "gloo", registered)

    def context(device: Any, local_rank: int) -> HostContext:
        made = HostContext()
        made.identity = made.identity if shares else "one"
        return made

    monkeypatch.setattr(library, "context", context)

    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> None:
        assert forms.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
        assert device.staged == 2

    def stores() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "hvdlite-store"]

    before = stores()
    on_devices(2, main)
    wait_for(lambda: set(stores()) <= set(before))
    assert ("no link" if shares else "use the same device") in caplog.text


def test_a_rank_that_fails_is_named_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of a rank fails within a collective; nobody waits for ever."""
    monkeypatch.setattr("hvdlite.common.engine.control_plane.BLAME_SECONDS", 0.1)

    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> str:
        forms.allreduce(torch.ones(1), name="before")
        if rank == 1:
            break_library(current())
        with pytest.raises(hvd.HorovodInternalError) as caught:
            forms.allreduce(torch.ones(1), name="x")
        return str(caught.value)

    texts = on_devices(2, main)
    assert all("rank 1" in text and "broken cable" in text for text in texts), texts


def break_library(runtime: Runtime) -> None:
    """Let all communicators of a rank fail from now on."""
    for communicator in runtime.engine.devices._communicators._existing():
        vars(communicator)["_group"] = Broken(vars(communicator)["_group"])


class Broken:
    """A process group that fails. The whole one lives on: its end would be the first failure."""

    def __init__(self, whole: object) -> None:
        self.whole = whole

    def allreduce(self, *args: object) -> None:
        raise RuntimeError("broken cable")

    def abort(self) -> None:
        """Do nothing."""
