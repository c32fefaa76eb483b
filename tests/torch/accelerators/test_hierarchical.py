"""Allreduces of several hosts in layers: the library inside hosts, the host's backends between."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch

import hvdlite.torch as hvd
from fake_accelerator import FakeLibrary
from hvdlite.common.api.forms import Forms
from hvdlite.common.devices.communicators import layers_of
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from hvdlite.torch.accelerators.context import TorchContext
from tests.common.devices.nccl.fake import Fake
from tests.torch.accelerators.direct import CountingDevice, on_devices
from tests.torch.accelerators.fakes import Rank, on_fake, wait_for
from tests.torch.accelerators.test_nccl import Rank as NcclRank
from tests.torch.accelerators.test_nccl import on_nccl

Tensor = torch.Tensor
PAIRS = [[0, 2], [1, 3]]
THREES = [[0, 1, 2], [3, 4, 5]]
LAYERS = Config(devices="gloo", device_allreduce="hierarchical")
FAKE_LAYERS = Config(devices="fake", device_allreduce="hierarchical")


class Counted:
    """Counts the elements that pass through memory of the host between hosts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []
        allocate = TorchContext.host_memory

        def counting(context: TorchContext, count: int, dtype: str) -> object:
            self.counts.append(count)
            return allocate(context, count, dtype)

        monkeypatch.setattr(TorchContext, "host_memory", counting)


def members_of_communicators(rank: int) -> list[tuple[int, ...]]:
    return [ranks for _, ranks in current().engine.devices._communicators._known]


@pytest.mark.parametrize(
    ("hosts", "op"),
    [(PAIRS, hvd.Sum), (PAIRS, hvd.Product), (THREES, hvd.Sum), (THREES, hvd.Min)],
)
def test_integers_have_the_bits_of_a_sum_of_all(
    hosts: list[list[int]], op: hvd.ReduceOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that no host can divide evenly, alone and fused."""
    size = sum(map(len, hosts))
    values = torch.randint(-9, 9, (size, 1001), dtype=torch.int64)
    expected = {hvd.Sum: values.sum(0), hvd.Min: values.min(0).values, hvd.Product: values.prod(0)}
    counted = Counted(monkeypatch)

    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> None:
        mine = values[rank]
        assert torch.equal(forms.allreduce(mine, op=op), expected[op])
        parts = forms.grouped_allreduce([mine[:7], mine[7:7], mine[7:]], op=op)
        assert torch.equal(torch.cat(parts), expected[op])
        assert torch.equal(mine, values[rank]), "the input is as it was"
        assert forms.allreduce(torch.zeros(0), op=hvd.Sum).shape == (0,)
        mates = tuple(next(host for host in hosts if rank in host))
        assert members_of_communicators(rank) == [mates], "no library between hosts"
        assert device.staged == 0

    on_devices(size, main, LAYERS, hosts=hosts)
    assert set(filter(None, counted.counts)) == {-(-1001 // len(hosts[0]))}, "one part of it"


def test_averages_factors_and_other_collectives() -> None:
    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> None:
        tensor = torch.full((5,), rank + 1.0)
        assert forms.allreduce(tensor).tolist() == [2.5] * 5
        scaled = forms.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        assert scaled.tolist() == [5.0] * 5
        half = forms.allreduce_(tensor.bfloat16(), op=hvd.Average)
        assert half.tolist() == [2.5] * 5
        assert forms.allgather(torch.tensor([rank])).tolist() == [0, 1, 2, 3]
        assert forms.broadcast(tensor, 3).tolist() == [4.0] * 5
        assert forms.reducescatter(torch.arange(4), op=hvd.Sum).tolist() == [4 * rank]
        assert device.staged == 0

    on_devices(4, main, LAYERS, hosts=PAIRS)


def test_process_sets_and_joined_ranks() -> None:
    """A set that is on one host, or has one member on each, has no layers."""

    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> None:
        sets = [hvd.add_process_set(ranks) for ranks in ([0, 2], [0, 1], [0, 1, 2])]
        for each in sets:
            if rank in (each.ranks or ()):
                total = forms.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=each)
                assert total.tolist() == [sum(each.ranks or ())]
        if rank != 2:
            assert forms.allreduce(torch.full((3,), rank), op=hvd.Max).tolist() == [3] * 3
        forms.join()
        assert device.staged == 0

    on_devices(4, main, LAYERS, hosts=PAIRS)


@pytest.mark.parametrize("hosts", [[[0, 1], [2]], [[0], [1], [2]], [[0, 1, 2]]])
def test_other_topologies_are_reduced_by_the_library_alone(hosts: list[list[int]]) -> None:
    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> None:
        assert forms.allreduce(torch.tensor([rank]), op=hvd.Sum).tolist() == [3]
        assert members_of_communicators(rank) == [(0, 1, 2)]
        assert layers_of(current().engine._executor.members_of((0, 1, 2))) is None
        assert device.staged == 0

    on_devices(3, main, LAYERS, hosts=hosts)


def test_rank_0_decides_for_all_ranks() -> None:
    """A rank that does not want layers lets all do without."""

    def main(rank: Rank) -> None:
        assert rank.read(rank.forms.allreduce(torch.ones(3), op=hvd.Sum)) == [4.0] * 3
        assert members_of_communicators(rank.rank) == [(0, 1, 2, 3)]

    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        made = [FakeLibrary(device=rank) for rank in range(4)]
        without = FakeLibrary(device=3)
        vars(without)["supports"] = lambda collective, dtype, op: collective != "reducescatter"
        made[3] = without
        on_fake(main, made, context, FAKE_LAYERS, PAIRS)


def test_the_layers_of_others_outlive_a_set_of_one_host() -> None:
    """The ranks of other hosts do not forget what the ranks of this one have together."""

    def main(rank: int, forms: Forms[Tensor], device: CountingDevice) -> None:
        assert forms.allreduce(torch.tensor([rank]), op=hvd.Sum).tolist() == [6]
        pair = hvd.add_process_set([0, 2])
        if rank in (0, 2):
            total = forms.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=pair)
            assert total.tolist() == [2]
        assert hvd.remove_process_set(pair)
        assert forms.allreduce(torch.tensor([rank]), op=hvd.Sum).tolist() == [6]
        assert members_of_communicators(rank) == [(0, 2) if rank in (0, 2) else (1, 3)]

    on_devices(4, main, LAYERS, hosts=PAIRS)


def test_the_communicators_of_layers_are_closed_with_the_last_set_that_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sets share the ranks of the first host, and not those of the second one."""

    def main(here: Rank) -> None:
        first, second = (hvd.add_process_set(ranks) for ranks in ([0, 1, 3, 4], [0, 1, 4, 5]))

        def check(*sets: hvd.ProcessSet) -> None:
            for each in sets:
                if here.rank in (each.ranks or ()):
                    total = here.forms.allreduce(torch.ones(3), op=hvd.Sum, process_set=each)
                    assert here.read(total) == [4.0] * 3

        check(first, second)
        made = here.library.communicators
        assert len(made) == (2 if here.rank == 4 else here.rank != 2)
        assert hvd.remove_process_set(first)
        if here.rank in (3, 4):
            wait_for(lambda: made[0].is_closed)
        check(second)
        if here.rank in (0, 1):
            assert not made[0].is_closed, "the second set uses it"
        assert hvd.remove_process_set(second)
        wait_for(lambda: all(each.is_closed for each in made))
        assert not any(each.is_aborted for each in made)
        assert here.device.staged == 0

    libraries = [FakeLibrary(device=rank) for rank in range(6)]
    on_fake(main, libraries, monkeypatch, FAKE_LAYERS, [[0, 1, 2], [3, 4, 5]])


def test_order_on_the_stream_of_a_slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(here: Rank) -> None:
        tensors = [torch.full((n,), here.rank + 1.0) for n in (3, 4)]
        for _ in range(2):
            results = here.forms.grouped_allreduce(tensors, op=hvd.Average)
            assert [here.read(each) for each in results] == [[2.5] * 3, [2.5] * 4]
        assert here.journal[: len(here.journal) // 2] == [
            "copy 2", "reducescatter", "reducescatter done", "copy 1",
            "copy 1", "allgather", "allgather done", "scale", "copy 2",
        ]  # fmt: skip

    from fake_accelerator.streams import FakeModule

    made = [FakeLibrary(FakeModule(delay_seconds=0.001 * rank)) for rank in range(4)]
    on_fake(main, made, monkeypatch, FAKE_LAYERS, PAIRS)


def test_a_library_that_fails_inside_a_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other host waits between hosts, and hears of it."""
    monkeypatch.setattr("hvdlite.common.engine.control_plane.BLAME_SECONDS", 0.5)
    made = [FakeLibrary(device=rank) for rank in range(4)]
    made[2] = FakeLibrary(device=2, failures={1: "link 3 is down"})

    def main(here: Rank) -> str:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            for _ in range(2):
                here.read(here.forms.allreduce(torch.ones(2)))
        return str(caught.value)

    texts = on_fake(main, made, monkeypatch, FAKE_LAYERS, PAIRS)
    assert all("rank 2" in text and "link 3 is down" in text for text in texts), texts
    assert all(each.is_aborted for library in made for each in library.communicators)


def test_a_host_that_cannot_connect_lets_all_do_without_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks of one host share a device: first no layers, then no library at all."""
    made = [FakeLibrary(device=number) for number in (0, 1, 0, 3)]

    def main(here: Rank) -> None:
        assert here.read(here.forms.allreduce(torch.ones(1), op=hvd.Sum)) == [4.0]
        assert here.device.staged == 2

    with caplog.at_level(logging.WARNING, "hvdlite"):
        on_fake(main, made, monkeypatch, FAKE_LAYERS, PAIRS)
    assert "ranks 0 and 2 use the same device" in caplog.text


def test_the_binding_to_nccl_takes_layers(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(here: NcclRank) -> None:
        tensor = torch.arange(7.0) + here.rank
        assert here.read(here.forms.allreduce(tensor)) == [n + 1.5 for n in range(7)]
        assert here.device.staged == 0

    config = Config(devices="nccl", device_allreduce="hierarchical")
    on_nccl(fake, 4, main, monkeypatch, config, PAIRS)


def test_horovods_setting() -> None:
    def read(**settings: str) -> Sequence[str]:
        config = Config.from_environ({f"HOROVOD_{key}": text for key, text in settings.items()})
        return config.allreduce, config.device_allreduce

    assert read() == ("auto", "flat")
    assert read(HIERARCHICAL_ALLREDUCE="1") == ("hierarchical", "hierarchical")
