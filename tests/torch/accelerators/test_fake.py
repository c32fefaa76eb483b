"""A vendor's plug-in, played by tests/fake_accelerator: order, overlap, errors, what is staged.

Its streams do their work in threads, so that they can be held: what a test asserts while a stream
is held happens without waiting for it.
"""

from __future__ import annotations

import logging
import re
import threading
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from fake_accelerator import FakeLibrary
from fake_accelerator.context import FakeContext
from fake_accelerator.streams import FakeEvent, FakeModule
from hvdlite.common.api.forms import Forms
from hvdlite.common.base.errors import ConfigError
from hvdlite.common.devices import libraries
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from hvdlite.torch.adapter import TorchAdapter
from hvdlite.torch.autograd import TorchRunner
from tests.torch.accelerators.direct import CountingDevice
from tests.torch.accelerators.fakes import ON_HOST, Rank, on_fake, wait_for


def test_the_device_waits_for_events_and_the_threads_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def main(here: Rank) -> None:
        tensor = torch.zeros(4)
        here.read(here.forms.allreduce(torch.ones(1), name="connect"))
        go_on = here.hold()
        here.compute(lambda: tensor.add_(here.rank + 1))
        handle = here.forms.allreduce_async(tensor, op=hvd.Sum)
        here.compute(lambda: tensor.mul_(1))
        result = here.forms.synchronize(handle)  # Returns, though nothing was computed.
        assert tensor.tolist() == [0.0] * 4
        doubled = torch.empty(4)
        here.compute(lambda: doubled.copy_(result * 2))
        go_on()
        assert here.read(doubled) == [6.0] * 4
        assert here.device.staged == 0

    on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch)


def test_poll_asks_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(here: Rank) -> None:
        go_on = here.hold()
        handle = here.forms.allreduce_async_(torch.ones(2), name="x")
        assert not here.forms.poll(handle)
        go_on()
        here.read(here.forms.synchronize(handle))
        hvd.barrier()

    on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch)


def test_communication_begins_before_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second gradient is not computed yet when the first one is reduced."""

    def main(here: Rank) -> None:
        first, second = torch.ones(2), torch.zeros(2)
        here.compute(lambda: first.mul_(here.rank + 1))
        one = here.forms.allreduce_async_(first, name="first", op=hvd.Sum)
        here.forms.synchronize(one)
        go_on = here.hold()
        here.compute(lambda: second.fill_(here.rank + 1))
        two = here.forms.allreduce_async_(second, name="second", op=hvd.Sum)
        wait_for(lambda: first.tolist() == [3.0, 3.0])
        assert not here.forms.poll(two)
        assert here.journal.count("allreduce") == 1, "the second waits for its event"
        go_on()
        assert here.read(here.forms.synchronize(two)) == [3.0, 3.0]

    on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch)


def test_the_order_on_the_communication_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a group are packed, scaled, reduced together, scaled and unpacked."""

    def main(here: Rank) -> None:
        tensors = [torch.full((n,), here.rank + 1.0) for n in (3, 5)]
        here.forms.grouped_allreduce_(tensors, op=hvd.Average, prescale_factor=2.0)
        assert [here.read(tensor) for tensor in tensors] == [[3.0] * 3, [3.0] * 5]
        assert here.journal == ["copy 2", "scale", "allreduce", "allreduce done", "scale", "copy 2"]
        here.journal.clear()
        one = torch.ones(4)
        here.forms.allreduce_(one, op=hvd.Sum)
        assert here.read(one) == [2.0] * 4
        assert here.journal == ["allreduce", "allreduce done"], "one tensor is reduced where it is"

    on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch)


def test_every_collective_in_slow_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has slow streams: results are right, as each stream waits for what it needs."""

    def main(here: Rank) -> None:
        rank, forms = here.rank, here.forms
        row = torch.tensor([rank, 1])
        assert here.read(forms.allreduce(row, op=hvd.Sum)) == [1, 2]
        assert here.read(forms.allgather(row)) == [0, 1, 1, 1]
        assert here.read(forms.allgather(torch.full((rank + 1,), rank))) == [0, 1, 1]
        assert here.read(forms.broadcast(row, 1)) == [1, 1]
        assert here.read(forms.alltoall(row)) == [[0, 1], [1, 1]][rank]
        assert here.read(forms.reducescatter(torch.arange(3), op=hvd.Sum)) == [[0, 2], [4]][rank]
        matrix = torch.zeros(2, 2, dtype=torch.int64)
        matrix[:, 0] = rank
        forms.broadcast_(matrix[:, 0], 1)
        assert here.read(matrix) == [[1, 0], [1, 0]]
        assert here.device.staged == 0

    slow = FakeLibrary(FakeModule(delay_seconds=0.001))
    on_fake(main, [FakeLibrary(), slow], monkeypatch)


def test_a_library_that_fails_ends_the_job_and_names_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1's second collective fails while the others wait for it on their devices."""
    monkeypatch.setattr("hvdlite.common.engine.control_plane.BLAME_SECONDS", 0.1)
    made = [FakeLibrary(), FakeLibrary(failures={2: "link 3 is down"}), FakeLibrary()]

    def main(here: Rank) -> str:
        assert here.read(here.forms.allreduce(torch.ones(1), op=hvd.Sum)) == [3.0]
        tensor = torch.ones(2)
        here.forms.synchronize(here.forms.allreduce_async_(tensor, op=hvd.Sum))
        here.read(tensor)  # The stream goes on, as the communicators are aborted.
        with pytest.raises(hvd.HorovodInternalError) as caught:
            here.forms.allreduce(torch.ones(1))
        return str(caught.value)

    texts = on_fake(main, made, monkeypatch)
    assert all("rank 1" in text and "link 3 is down" in text for text in texts), texts
    assert all(each.is_aborted for library in made for each in library.communicators)


def test_with_host_completion_the_call_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.common.engine.control_plane.BLAME_SECONDS", 0.1)

    def main(here: Rank) -> None:
        result = here.forms.allreduce(torch.ones(1), op=hvd.Sum)
        assert result.tolist() == [2.0], "the thread has waited for the device"
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 0.*out of memory"):
            here.forms.allreduce_(torch.ones(1))

    failing = FakeLibrary(failures={2: "out of memory"})
    on_fake(main, [failing, FakeLibrary()], monkeypatch, ON_HOST)


def test_an_event_that_raises_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's do when a kernel of the user's has failed: nobody may wait for ever."""
    monkeypatch.setattr("hvdlite.common.engine.control_plane.BLAME_SECONDS", 0.1)

    class Broken(FakeEvent):
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    def main(here: Rank) -> None:
        here.forms.allreduce(torch.ones(1))
        if here.rank == 1:
            context: Any = current().engine.devices._devices["FCCL"].context
            context.record = lambda stream: Broken()
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1.*illegal memory access"):
            here.forms.allreduce(torch.ones(1))
            here.forms.allreduce(torch.ones(1))

    on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch, ON_HOST)


def test_the_finalizer_begins_as_the_device_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def begin_thread(self: FakeContext) -> None:
        begun.append(threading.current_thread().name)
        raise RuntimeError("which is no reason to stand still")

    monkeypatch.setattr(FakeContext, "begin_thread", begin_thread, raising=False)

    def main(here: Rank) -> None:
        for _ in range(2):
            assert here.forms.allreduce(torch.ones(1), op=hvd.Sum).tolist() == [2.0]

    on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch, ON_HOST)
    assert begun == ["hvdlite-device-FCCL"] * 2


def test_a_lost_rank_is_named_and_its_peers_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is lost while rank 0's device waits for it: the news comes by the host."""

    def main(here: Rank) -> None:
        here.read(here.forms.allreduce(torch.ones(1)))
        if here.rank == 1:
            go_on = here.hold()
            here.compute(lambda: None)
            here.forms.allreduce_async(torch.ones(1), name="x")
            here.forms.barrier()
            current().engine.abandon(hvd.HorovodInternalError("rank 1 was killed", rank=1))
            go_on()
            return
        handle = here.forms.allreduce_async_(torch.ones(1), name="x")
        here.forms.barrier()
        wait_for(lambda: current().engine.finished)
        with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
            here.forms.synchronize(handle)
            here.forms.allreduce(torch.ones(1))

    on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch)


def test_what_one_rank_cannot_is_staged_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(here: Rank) -> None:
        assert here.read(here.forms.allreduce(torch.ones(1), op=hvd.Sum)) == [2.0]
        assert here.device.staged == 0
        assert here.read(here.forms.allreduce(torch.ones(1).int(), op=hvd.Sum)) == [2]
        assert here.device.staged == 2, "rank 1 has no int32"
        product = here.forms.allreduce(torch.full((1,), 3.0), op=hvd.Product)
        assert here.read(product) == [9.0]
        assert here.read(here.forms.allreduce(torch.ones(1).double(), op=hvd.Sum)) == [2.0]
        assert here.device.staged == 6

    made = [FakeLibrary(), FakeLibrary(dtypes=frozenset(("float32",)))]
    on_fake(main, made, monkeypatch)


class PanicError(BaseException):
    """As that of a library that is written in Rust, which is no `Exception`."""


class Panicking(FakeLibrary):
    def connect(self, *args: Any) -> Any:
        raise PanicError("no driver")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ([FakeLibrary(device=0), FakeLibrary(device=0)], "ranks 0 and 1 use the same device"),
        ([FakeLibrary(), FakeLibrary(refusal="no driver")], "cannot connect rank 1: .*no driver"),
        ([FakeLibrary(), Panicking()], "cannot connect rank 1: PanicError: no driver"),
    ],
)
def test_ranks_that_cannot_be_connected_are_staged(
    made: list[FakeLibrary],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def main(here: Rank) -> None:
        for _ in range(2):
            assert here.read(here.forms.allreduce(torch.ones(1), op=hvd.Sum)) == [2.0]
        assert here.device.staged == 4

    with caplog.at_level(logging.WARNING, "hvdlite"):
        on_fake(main, made, monkeypatch)
    warnings = [each.message for each in caplog.records if "host memory" in each.message]
    assert len(warnings) == 1
    assert re.search(reason, warnings[0])


def test_sums_of_integers_have_the_bits_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randint(-1000, 1000, (3, 501), dtype=torch.int32)

    def main(here: Rank) -> list[Any]:
        tensors = [values[here.rank, :200].clone(), values[here.rank, 200:].clone()]
        return [here.read(each) for each in here.forms.grouped_allreduce(tensors, op=hvd.Sum)]

    expected = values.sum(0).tolist()
    for first, second in on_fake(main, [FakeLibrary() for _ in range(3)], monkeypatch):
        assert first + second == expected


def test_joined_ranks_give_neutral_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(here: Rank) -> None:
        if here.rank == 0:
            assert here.read(here.forms.allreduce(torch.full((2,), -5), op=hvd.Max)) == [-5, -5]
            assert here.read(here.forms.allreduce(torch.ones(2), op=hvd.Sum)) == [1.0, 1.0]
            assert here.device.staged == 0
        here.forms.join()

    on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch)


def test_everything_is_closed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(here: Rank) -> FakeLibrary:
        pair = hvd.add_process_set([0, 1])
        if here.rank < 2:
            here.forms.allreduce_async(torch.ones(1), process_set=pair)
        here.forms.allreduce(torch.ones(1))
        return here.library

    for library in on_fake(main, [FakeLibrary() for _ in range(3)], monkeypatch):
        wait_for(lambda made=library: all(each.is_closed for each in made.communicators))  # type: ignore[misc]
        assert library.communicators


def test_a_set_that_is_removed_has_no_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closed behind the set's work, on all members alike; those of others are not."""

    def main(here: Rank) -> None:
        here.forms.allreduce(torch.ones(1))
        for turn in range(2):
            pair = hvd.add_process_set([0, 1])
            tensor = torch.ones(2)
            if here.rank < 2:
                here.read(here.forms.allreduce(torch.ones(1), process_set=pair))
                go_on = here.hold()
                handle = here.forms.allreduce_async_(tensor, op=hvd.Sum, process_set=pair)
                here.forms.synchronize(handle)
                of_pair = here.library.communicators[1 + turn]
            assert hvd.remove_process_set(pair)
            if here.rank < 2:
                assert not of_pair.is_closed
                go_on()
                assert here.read(tensor) == [2.0, 2.0]
                wait_for(lambda made=of_pair: made.is_closed)  # type: ignore[misc]
                assert not of_pair.is_aborted
        here.read(here.forms.allreduce(torch.ones(1)))
        assert not here.library.communicators[0].is_closed
        assert len(here.library.communicators) == (3 if here.rank < 2 else 1)
        buffers = current().engine.devices._buffers
        assert {ranks for _, ranks, _, _ in buffers} <= {(0, 1, 2)}

    on_fake(main, [FakeLibrary() for _ in range(3)], monkeypatch)


@pytest.mark.parametrize("layers", [False, True])
def test_two_libraries_of_a_rank_share_no_memory(
    layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device has not unpacked its sums when the other one is done with its own."""

    class Other(FakeLibrary):
        name, device_kind = "OTHER", "other"

    made = {f"rank-{rank}": Other(device=rank) for rank in range(4)}
    second = libraries._Registered(lambda: made[threading.current_thread().name], by_name_only=True)
    monkeypatch.setitem(libraries._registered, "fake:other", second)

    def main(here: Rank) -> None:
        other = Rank(here.rank, made[f"rank-{here.rank}"])
        other.device = CountingDevice("other", other.library.module)
        other.forms = Forms(TorchRunner(TorchAdapter(lambda kind: other.device)))
        for each in (here, other):
            each.read(each.forms.allreduce(torch.ones(8), op=hvd.Sum, name="connect"))
        context: Any = current().engine.devices._devices["FCCL"].context
        copy, may_unpack, copies = context.copy, threading.Event(), []
        held = 3 if layers else 2  # The copy that brings the sums back.

        def slow(targets: Any, sources: Any) -> None:
            copies.append(targets)
            if len(copies) == held:
                assert may_unpack.wait(20)
            copy(targets, sources)

        context.copy = slow
        one, two = ([torch.full((n,), value) for n in (3, 5)] for value in (1.0, 100.0))
        handle = here.forms.grouped_allreduce_async_(one, op=hvd.Sum)
        wait_for(lambda: len(copies) == held)
        other.forms.grouped_allreduce_(two, op=hvd.Sum)
        assert [other.read(each) for each in two] == [[400.0] * 3, [400.0] * 5]
        may_unpack.set()
        here.forms.synchronize(handle)
        assert [here.read(each) for each in one] == [[4.0] * 3, [4.0] * 5]
        assert here.device.staged == other.device.staged == 0

    config = Config(devices="fake", device_allreduce="hierarchical" if layers else "flat")
    on_fake(
        main, [FakeLibrary(device=rank) for rank in range(4)], monkeypatch, config, [[0, 1], [2, 3]]
    )


def test_plug_ins_are_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    good = EntryPoint("fake", "fake_accelerator:library", libraries.ENTRY_POINTS)
    bad = EntryPoint("broken", "fake_accelerator:nothing", libraries.ENTRY_POINTS)
    monkeypatch.setattr(libraries, "installed_plug_ins", lambda: (good, bad))
    assert [each.name for each in libraries.find_libraries("auto")] == ["FCCL"]
    assert [each.name for each in libraries.find_libraries("fake")] == ["FCCL"]
    assert libraries.find_libraries("off") == []
    with pytest.raises(ConfigError, match=r"HVDLITE_DEVICES=nccl3: .*these are: .*fake"):
        libraries.find_libraries("nccl3")


def test_one_finalizer_thread_watches_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All process sets and collectives of a rank share it, and the engine waits for nothing."""

    def main(here: Rank) -> None:
        pair = hvd.add_process_set([0, 1])
        here.read(here.forms.allreduce(torch.ones(1)))
        if here.rank < 2:
            here.read(here.forms.allgather(torch.ones(1), process_set=pair))
        here.forms.barrier()
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("hvdlite-device-FCCL") == 3, "one for each of three ranks"
        here.forms.barrier()

    on_fake(main, [FakeLibrary() for _ in range(3)], monkeypatch)


def test_communicators_are_made_anew_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the next world of an elastic job, whose ranks have the same libraries."""
    monkeypatch.setattr("hvdlite.common.engine.control_plane.BLAME_SECONDS", 0.2)
    made = [FakeLibrary(), FakeLibrary(failures={1: "a flash"})]

    def fail(here: Rank) -> None:
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1.*a flash"):
            here.forms.allreduce(torch.ones(1))

    def succeed(here: Rank) -> None:
        assert here.read(here.forms.allreduce(torch.ones(2), op=hvd.Sum)) == [2.0, 2.0]
        assert here.device.staged == 0

    on_fake(fail, made, monkeypatch, ON_HOST)
    made[1]._failures = {}
    on_fake(succeed, made, monkeypatch, ON_HOST)
    for library in made:
        first, second = library.communicators
        assert first.is_aborted
        assert not first.is_closed
        wait_for(lambda closed=second: closed.is_closed)  # type: ignore[misc]
        assert not second.is_aborted
