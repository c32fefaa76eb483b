"""When a device ran segments, on the host's clock: in the timeline and for the iteration trace.

The oracle is the host's clock as the work of the stream itself reads it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from fake_accelerator import FakeLibrary
from fake_accelerator.communicator import FakeCommunicator
from fake_accelerator.streams import FakeModule
from hvdlite.common.devices.data_plane import DeviceClock
from hvdlite.common.devices.nccl.context import CudaContext
from hvdlite.common.devices.nccl.cudart import CudaRuntime
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.current import current
from hvdlite.tools.timeline_plot import collect
from hvdlite.tools.timeline_reader import check
from hvdlite.torch.accelerators.context import HostContext
from tests.common.devices.nccl.fake import Fake
from tests.torch.accelerators.fakes import ON_HOST, Rank, on_fake, wait_for

DELAY = 0.01  # Seconds before each work of a stream.
EXACT, ATTEMPTS = 0.002, 50  # What a thread may lose between two statements, seldom more.


def test_a_segment_has_the_times_of_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "timeline.json"
    reduced: list[float] = []
    runs: list[SegmentRun] = []
    allreduce = FakeCommunicator.allreduce

    def noted(self: Any, *arguments: Any) -> None:
        allreduce(self, *arguments)
        if self is libraries[0].communicators[0]:
            reduced.append(time.monotonic())

    monkeypatch.setattr(FakeCommunicator, "allreduce", noted)
    libraries = [FakeLibrary(FakeModule(delay_seconds=DELAY)) for _ in range(2)]

    trace: list[Any] = []

    def main(here: Rank) -> None:
        executor = current().engine._executor
        if here.rank == 0:
            hvd.start_timeline(str(path))
            executor.observers = (*executor.observers, runs.append)
        here.forms.allreduce(torch.ones(4), name="first")
        rows = hvd.trace_iterations()
        with rows.iteration():
            here.forms.allreduce(torch.ones(4), name="second")
        rows.stop()
        if here.rank == 0:
            trace.extend(rows.rows())
            wait_for(lambda: len(runs) == 2)
            hvd.stop_timeline()

    on_fake(main, libraries, monkeypatch, ON_HOST)
    assert len(reduced) == 2
    for run, done in zip(runs, reduced, strict=True):
        # Packing and the collective are before `done`, in one work; unpacking and the event behind.
        assert run.start + DELAY - EXACT < done < run.end - 2 * DELAY + EXACT
    (traced,) = trace[0].segments  # Of the second one: the first was in no iteration.
    assert (traced.start, traced.end) == (runs[1].start, runs[1].end)
    events = json.loads(path.read_text())
    spans = [event for event in events if event["ph"] == "X" and event["dur"]]
    assert [span["args"]["names"] for span in spans] == [["allreduce.first"], ["allreduce.second"]]
    for span, run in zip(spans, runs, strict=True):
        assert span["name"] == "ALLREDUCE"
        assert span["dur"] == pytest.approx((run.end - run.start) * 1e6, abs=2)
    apart = spans[1]["ts"] - spans[0]["ts"]
    assert apart == pytest.approx((runs[1].start - runs[0].start) * 1e6, abs=2)
    assert not check(events).problems
    (row,) = [each for each in collect(events) if each.name == "[device fake]"]
    assert [span.end - span.start for span in row.spans] == [span["dur"] for span in spans]


def test_nobody_is_asked_for_times_that_nobody_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceClock, "span", lambda *_: pytest.fail("nobody watches"))

    def main(here: Rank) -> None:
        assert here.read(here.forms.allreduce(torch.ones(2))) == [1, 1]

    on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch)


@pytest.mark.parametrize("kind", ["cuda", "host"])
def test_contexts_tell_the_times_of_events(kind: str, fake: Fake) -> None:
    context: Any = HostContext() if kind == "host" else CudaContext(CudaRuntime(fake.path), 0)
    stream = context.new_stream()
    for _ in range(ATTEMPTS):  # A thread may lose its core amid one of them.
        before = time.monotonic()
        begin = context.record_timed(stream)
        begin.synchronize()
        between = time.monotonic()
        end = context.record_timed(stream)
        end.synchronize()
        after = time.monotonic()
        started, ended = DeviceClock(context).span(begin, end)
        limits = (before, started, between), (between, ended, after)
        if all(low - EXACT < at < high + EXACT for low, at, high in limits):
            break
    else:
        pytest.fail(f"{limits}")
    context.free_stream(stream)
