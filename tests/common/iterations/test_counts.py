"""What a rank counts while it runs, and how it travels to the launcher."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdlite
import hvdlite.numpy as hvd
from hvdlite.common.base.metrics import METRICS, Sample, pack, unpack
from hvdlite.common.connections.order_lines import Order
from hvdlite.common.iterations import launcher_orders
from hvdlite.common.iterations.counts import Counts, ProcessFacts
from hvdlite.common.iterations.live import counts_of
from hvdlite.common.iterations.rows import IterationTimes
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from tests.ranks import run_ranks

ROOT = Path(hvdlite.__file__).parents[1]

pytestmark = pytest.mark.timeout(120)


def test_collectives_are_counted_with_their_bytes() -> None:
    def main(rank: int) -> dict[str, float]:
        before = hvd.metrics()
        assert before["steps_total"] == 0
        hvd.allreduce(np.ones(10, np.float32), name="a")
        hvd.allgather(np.ones((2, 3), np.float64), name="b")
        hvd.allreduce(np.ones(5, np.float32), name="c")
        return hvd.metrics()

    for found in run_ranks(2, main):
        assert found["collective_calls_total.allreduce"] == 2
        assert found["collective_tensors_total.allreduce"] == 2
        assert found["collective_bytes_total.allreduce"] == 60
        assert found["collective_bytes_total.allgather"] == 48
        assert {key.partition(".")[0] for key in found} <= set(METRICS)
        assert found["memory_bytes"] > 1 << 20


def test_requests_are_counted_with_those_that_the_cache_had() -> None:
    def main(rank: int) -> list[tuple[float, float]]:
        found = []
        for step in range(3):
            for name in "abc" if step else "ab":
                hvd.synchronize(hvd.allreduce_async(np.ones(1 << 20, np.float32), name=name))
            values = hvd.metrics()
            found.append((values["requests_total"], values["cached_requests_total"]))
        return found

    for found in run_ranks(2, main):  # The first call of metrics() counts from itself on.
        (all0, bits0), (all1, bits1), (all2, bits2) = found
        assert (all1 - all0, bits1 - bits0) == (3, 2)
        assert (all2 - all1, bits2 - bits1) == (3, 3)


def test_the_settings_begin_it_and_the_shutdown_ends_it() -> None:
    def main(rank: int) -> tuple[bool, Counts]:
        runtime = current()
        began = runtime.trainers.counts is not None
        runtime.begin([], first=True)
        assert isinstance(runtime.trainers.counts, Counts) == runtime.config.live
        return began, counts_of(runtime)

    (began, counts), *_ = run_ranks(1, main, config=Config(live=True))
    steps = counts.steps
    assert not began and steps == 0
    assert counts._process._on_collection not in gc.callbacks


def put(counts: Counts, times: IterationTimes, *runs: SegmentRun) -> dict[str, float]:
    """What one more step adds."""
    before = counts.values()
    counts._put(times, list(runs))
    after = counts.values()
    return {key: round(after[key] - before.get(key, 0), 6) for key in after}


def test_the_times_of_a_step() -> None:
    """Two reductions: one ends in backward, for the other this rank waits after it."""
    first = SegmentRun(("a",), "allreduce", 4, start=2.0, end=3.0, ready=1.5)
    second = SegmentRun(("b",), "allreduce", 4, start=8.0, end=9.0, ready=5.0)

    def main(rank: int) -> None:
        counts = counts_of(current())
        put(counts, IterationTimes(-2.0, None, -1.0, 0.0, -1.0))
        added = put(counts, IterationTimes(0.0, 1.0, 6.0, 0.5, 10.0, samples=32), first, second)
        assert added["step_seconds_total"] == 11.0
        assert added["data_seconds_total"] == 1.0
        assert added["compute_seconds_total"] == 6.5
        assert added["exchange_hidden_seconds_total"] == 1.0
        assert added["exchange_waited_seconds_total"] == 3.5
        assert added["peers_waited_seconds_total"] == 2.0  # From the end of backward on.
        assert added["samples_total"] == 32
        assert counts._longest == (2.0, "b")

    run_ranks(1, main)


def test_waits_of_collectives_outside_of_steps_are_counted_once() -> None:
    def main(rank: int) -> None:
        counts = counts_of(current())
        for ready, start in ((1.0, 3.0), (1.0, 3.0), (2.0, 4.0)):
            counts._on_run(SegmentRun(("a",), "allreduce", 4, start, start, ready=ready))
        assert counts.values()["peers_waited_seconds_total"] == 3.0

    run_ranks(1, main)


def test_progress_goes_on_with_the_steps_or_with_calls() -> None:
    def main(rank: int) -> None:
        hvd.progress(100, 40)
        counts = current().trainers.counts  # Else who looks later would not know of steps before.
        assert isinstance(counts, Counts)
        assert counts.values()["progress_steps"] == 40
        counts._put(IterationTimes(0.0, None, 1.0, 0.0, 1.0), [])
        assert counts.values()["progress_steps"] == 41
        hvd.progress(100, 50)
        assert counts.values()["progress_steps"] == 50
        assert counts.values()["progress_total_steps"] == 100
        with pytest.raises(ValueError, match=r"progress\(-1, 0\)"):
            hvd.progress(-1)

    run_ranks(1, main)


def test_the_page_has_the_table_of_names() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    from make_metrics import PAGE, page

    assert PAGE.read_text() == page(PAGE.read_text()), "run: python docs/make_metrics.py"


def test_a_sample_travels() -> None:
    values = {"steps_total": 3.0, "collective_bytes_total.allreduce": 1e12, "core_speed": 40.5}
    sample = Sample(1, 4, values, "layer3.weight")
    assert unpack(pack(sample)) == sample


def test_a_sample_is_never_longer_than_a_pipe_takes_at_once() -> None:
    values = {"steps_total": 1.0}
    for number in range(100):
        values[
            f"collective_calls_total.c{'x' * 20}_{chr(97 + number % 26)}{'y' * (number // 26)}"
        ] = float(number)
    line = pack(Sample(0, 1, values, "t" * 5000))
    found = unpack(line)
    assert len(line) < 3900 and found is not None
    kept = [value for key, value in found.values.items() if key.startswith("collective")]
    assert kept and min(kept) > 99 - len(kept) - 1  # Those that are called most.


WRONG = [
    "", "null", "[]", "[1,0,1,\"\",[]]", "{", "[" * 5000, '[2,0,1,"",{}]', '[1,1,1,"",{}]',
    '[1,-1,1,"",{}]', '[1,0,1,5,{}]', '[1,0,1,"",{"unknown":1}]', '[1,0,1,"",{"steps_total":-1}]',
    '[1,0,1,"",{"steps_total":NaN}]', '[1,0,1,"",{"steps_total":"1"}]', '[1,0,1,"",{"cores.x":1}]',
    '[1,0,1,"",{"collective_calls_total":1}]', '[1,0,1,"",{"collective_calls_total.\\"}":1}]',
    '[1,0,1,"",{"steps_total":1e400}]', '[1,true,2,"",{}]',
]  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_what_is_no_sample_is_none(line: str) -> None:
    assert unpack(line) is None


SCALARS = st.none() | st.booleans() | st.floats() | st.text()


def deeper(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(inner) | st.dictionaries(st.text(), inner)


@given(st.recursive(SCALARS, deeper, max_leaves=20))
@pytest.mark.thorough
def test_any_json_is_a_sample_or_none(value: object) -> None:
    for line in (json.dumps(value), json.dumps([1, 0, 1, "", value])):
        found = unpack(line)
        assert found is None or unpack(pack(found)) is not None


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """What the launcher reads of a rank."""
    os.mkfifo(tmp_path / "events")
    reader = os.open(tmp_path / "events", os.O_RDWR)
    monkeypatch.setenv("HVDLITE_LAUNCHER_EVENTS", f"token 0 {tmp_path}/events")
    monkeypatch.setattr("hvdlite.common.iterations.counts.PERIOD_SECONDS", 0.01)
    yield reader
    os.close(reader)


def test_the_launcher_is_told_by_its_pipe(pipe: int) -> None:
    def main(rank: int) -> bytes:
        current().begin([], first=True)
        hvd.metrics()
        return os.read(pipe, 4096)

    (line,) = run_ranks(1, main, config=Config(live=True))
    token, event, rank, text = line.decode().splitlines()[0].split(" ", 3)
    assert (token, event, rank) == ("token", "live", "0")
    sample = unpack(text)
    assert sample is not None and sample.rank == 0 and sample.size == 1


def test_each_init_looks_whether_to_count(
    pipe: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one order to count may have come between two worlds, when this process was no rank."""
    monkeypatch.setattr(launcher_orders, "_obeying", {os.getpid()})  # Since an init before.

    def main(rank: int) -> bool:
        current().begin([], first=True)
        return current().trainers.counts is not None

    assert run_ranks(1, main) == [False]
    (tmp_path / "count").write_bytes(b"all")
    for _ in range(2):
        said = run_ranks(1, lambda rank: main(rank) and os.read(pipe, 4096)[:12])
        assert said == [b"token live 0"]


def test_orders_go_on_to_ranks_that_the_launcher_does_not_reach() -> None:
    """As under mpirun: a rank on the launcher's host has a pipe, and its engine passes them on."""
    heard: list[list[str]] = [[] for _ in range(3)]
    came = threading.Semaphore(0)

    def main(rank: int) -> None:
        engine = current().engine

        def take(line: str) -> None:
            heard[rank].append(line)
            came.release()

        if rank != 0:
            engine.take_launcher_orders(take)
        hvd.barrier()
        if rank == 1:
            engine.pass_launcher_order(2, "stack")
            engine.pass_launcher_order(-1, "count")
            for _ in range(3):
                assert came.acquire(timeout=20)
        hvd.barrier()
        if rank == 0:  # Nothing is lost that comes before it is ready.
            engine.take_launcher_orders(take)
            assert came.acquire(timeout=20)

    run_ranks(3, main)
    assert heard == [["count"], ["count"], ["stack", "count"]]


@pytest.mark.parametrize("script_begins_one", [False, True])
def test_a_timeline_by_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script_begins_one: bool
) -> None:
    """The rank says at once that it has begun, and ends no timeline but its own."""
    ours, other = str(tmp_path / "ours.json"), str(tmp_path / "other.json")
    said = list[dict[str, Any]]()
    monkeypatch.setattr(launcher_orders, "SILENT_SECONDS", 0.01)

    def main(rank: int) -> None:
        recording = current().recording

        def answer(number: int, value: dict[str, Any]) -> None:
            assert number == 5
            if not said and script_begins_one:
                recording.start(other, False)
            said.append(value)

        monkeypatch.setattr(launcher_orders, "_answer", answer)
        counts = counts_of(current())
        before = set(threading.enumerate())
        launcher_orders._obey_order(Order(5, "timeline", (ours, 3)), lambda: counts)
        for thread in set(threading.enumerate()) - before:
            if thread.name == "hvdlite-timeline-order":
                thread.join(20)
        assert said == [{"begun": ours}, {"file": ours, "steps": 0, "seconds": 0.01}]
        assert recording.timeline.enabled == script_begins_one

    run_ranks(1, main)
    assert json.loads(Path(ours).read_text())


def test_a_tensor_that_is_outstanding(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is offered, and told since when, though nothing was exchanged."""

    def main(rank: int) -> tuple[Any, ...]:
        counts = counts_of(current())
        hvd.barrier()
        handle = hvd.allreduce_async(np.ones(3), name="late") if rank == 0 else None
        found = counts.history("late"), counts.history("none"), counts._outstanding()
        hvd.barrier()
        hvd.synchronize(hvd.allreduce_async(np.ones(3), name="late") if rank else handle)
        return found

    (late, none, oldest), (other, _, nothing) = run_ranks(2, main)
    assert (late["name"], late["runs"]) == ("allreduce.late", []) and late["waits"] >= 0
    assert none["others"][0] == "allreduce.late" and oldest[0][1] == "allreduce.late"
    assert other["name"] == "" and nothing == []


def test_the_last_runs_of_a_tensor() -> None:
    first_is_ready = [threading.Event() for _ in range(12)]

    def main(rank: int) -> tuple[Any, ...]:
        counts = counts_of(current())
        for began in first_is_ready:
            if rank == 1:
                assert began.wait(20)
            handle = hvd.allreduce_async(np.ones(10, np.float32), name="w")
            began.set()
            hvd.synchronize(handle)
        hvd.allreduce(np.ones(3, np.float32), name="b")
        return (
            counts.history("w"), counts.history("allreduce.b"), counts.history("re"),
            counts.history("none"), counts.wait_for_steps(1, 0.01),
        )  # fmt: skip

    found = run_ranks(2, main)
    for by_name, whole, part, none, steps in found:
        assert (by_name["name"], len(by_name["runs"])) == ("allreduce.w", 10)
        assert (whole["name"], len(whole["runs"])) == ("allreduce.b", 1)
        assert part["others"] == none["others"] == ["allreduce.b", "allreduce.w"]
        assert steps == 0, "none was made"
        for ready, start, end, size, tensors in by_name["runs"]:
            assert ready <= start <= end and (size, tensors) == (40, 1)
    (first, *_), (second, *_) = found
    for early, late in zip(first["runs"], second["runs"], strict=True):
        assert early[0] < late[0], "each rank tells when it was ready itself"


def test_an_interrupt_during_a_garbage_collection_is_not_lost() -> None:
    """It comes while the collection runs, so that the end of that is what runs next."""
    others, gc.callbacks[:] = gc.callbacks[:], []  # Those may be Python code.
    began, facts = time.monotonic(), ProcessFacts()
    much: list[list[int]] = [[] for _ in range(400_000)]
    before = signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    try:
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.001)
                gc.collect()
                for _ in range(1_000_000):
                    pass
    finally:
        signal.signal(signal.SIGVTALRM, before)
        facts.close()
        gc.callbacks[:] = others
    assert len(much) == 400_000
    assert 0.001 < facts.values()["gc_seconds_total"] < time.monotonic() - began
