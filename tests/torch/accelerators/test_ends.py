"""However an engine ends: calls end when the device has left their memory, and not before.

Whoever owns the memory frees it when a call ends, also where the framework knows nothing of the
streams of hvdlite.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from fake_accelerator import FakeLibrary
from fake_accelerator.context import FakeContext
from hvdlite.common.api.submit import Operation
from hvdlite.common.runtime.current import current
from tests.torch.accelerators.fakes import ON_HOST, Rank, on_fake, wait_for


def the_device() -> Any:
    """Return the device of the calling rank, as the engine has it."""
    return current().engine.devices._devices["FCCL"]


def operation(number: int) -> Operation[torch.Tensor]:
    """Return the operation behind a number that users have."""
    found = current().handles.get(number)
    assert isinstance(found, Operation)
    return found


def queue(here: Rank, **options: Any) -> Operation[torch.Tensor]:
    """Return an allreduce that is queued on the device of the calling rank."""
    found = operation(here.forms.allreduce_async(torch.ones(1), **options))
    pending = current().engine._pending
    wait_for(lambda: not pending.has(found.entries[0]))
    return found


def assert_all_aborted(here: Rank) -> None:
    wait_for(lambda: all(each.is_aborted for each in here.library.communicators))


def test_a_segment_that_fails_halfway_ends_behind_what_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hvdlite.common.engine.control_plane.BLAME_SECONDS", 0.1)

    def main(here: Rank) -> None:
        here.forms.allreduce(torch.ones(1))
        if here.rank == 0:
            with pytest.raises(hvd.HorovodInternalError, match=r"rank 1.*no more events"):
                here.forms.allreduce(torch.ones(1), name="x")
            return
        device = the_device()
        go_on = device.stream.hold()
        record = device.context.record

        def fail_once(stream: Any) -> Any:
            device.context.record = record
            raise RuntimeError("no more events")

        device.context.record = fail_once
        handle = operation(here.forms.allreduce_async(torch.ones(1), name="x"))
        assert_all_aborted(here)
        assert current().engine.failed
        assert not handle.poll(), "the stream still has its work"
        go_on()
        with pytest.raises(hvd.HorovodInternalError, match="no more events"):
            handle.wait()

    on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch, ON_HOST)


def test_the_work_of_a_set_that_was_removed_is_aborted_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its communicator belongs to no set any more, and waits for its work."""
    removed = threading.Barrier(3)

    def main(here: Rank) -> None:
        pair = hvd.add_process_set([0, 1])
        here.forms.allreduce(torch.ones(1))
        go_on = None
        if here.rank < 2:
            here.forms.allreduce(torch.ones(1), process_set=pair)
            if here.rank == 1:
                go_on = the_device().stream.hold()
            handle = queue(here, process_set=pair)
        here.forms.barrier()
        hvd.remove_process_set(pair)
        removed.wait(20)
        if here.rank == 2:
            current().engine.abandon(hvd.HorovodInternalError("rank 2 was killed", rank=2))
        if here.rank == 0:  # Whose device waits for that of rank 1.
            with pytest.raises(hvd.HorovodInternalError, match="rank 2"):
                handle.wait()
            assert here.library.communicators[1].is_aborted
        if go_on is not None:
            assert_all_aborted(here)
            assert not handle.poll(), "the stream still has its work"
            go_on()
            with pytest.raises(hvd.HorovodInternalError, match="rank 2"):
                handle.wait()

    on_fake(main, [FakeLibrary() for _ in range(3)], monkeypatch, ON_HOST)


def test_a_shutdown_aborts_what_the_device_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.common.devices.finalizer.DRAIN_SECONDS", 0.1)

    def main(here: Rank) -> Any:
        here.forms.allreduce(torch.ones(1))
        go_on = the_device().stream.hold() if here.rank == 1 else None
        handle = queue(here)
        here.forms.barrier()
        return here, handle, go_on

    (_, first, _), (here, second, go_on) = on_fake(
        main, [FakeLibrary(), FakeLibrary()], monkeypatch, ON_HOST
    )
    assert_all_aborted(here)
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        first.wait()
    assert not second.poll(), "the stream still has its work"
    go_on()
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        second.wait()


def test_work_is_aborted_though_the_engine_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch over the device ends the call itself then."""
    monkeypatch.setattr("hvdlite.common.engine.control_plane.BLAME_SECONDS", 2.0)
    monkeypatch.setattr("hvdlite.common.devices.finalizer.DRAIN_SECONDS", 0.1)
    aborted: list[str] = []
    made = [FakeLibrary(), FakeLibrary(failures={2: "link 3 is down"})]

    def main(here: Rank) -> None:
        here.forms.allreduce(torch.ones(1))
        with pytest.raises(hvd.HorovodInternalError, match=r"link 3 is down|rank 1"):
            here.forms.allreduce(torch.ones(1))
        if here.rank == 1:
            aborted.extend("yes" for each in here.library.communicators if each.is_aborted)

    on_fake(main, made, monkeypatch, ON_HOST)
    assert aborted == ["yes"]


def test_a_device_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ABORT_SECONDS", "DRAIN_SECONDS"):
        monkeypatch.setattr(f"hvdlite.common.devices.finalizer.{name}", 0.1)
    free_stream = FakeContext.free_stream
    freed: list[str] = []

    def noted(self: FakeContext, stream: Any) -> None:
        freed.append(self.identity)
        free_stream(self, stream)

    monkeypatch.setattr(FakeContext, "free_stream", noted)

    def main(here: Rank) -> Any:
        here.forms.allreduce(torch.ones(1))
        go_on = the_device().stream.hold()
        handle = queue(here)
        here.forms.barrier()
        current().engine.abandon(hvd.HorovodInternalError("enough", rank=0))
        with pytest.raises(hvd.HorovodInternalError):
            handle.wait()
        wait_for(lambda: current().engine.finished)
        return go_on

    for go_on in on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch, ON_HOST):
        go_on()
    assert len(freed) == 2
