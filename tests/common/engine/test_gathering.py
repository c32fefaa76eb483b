"""When the engine is woken for what is enqueued, and by what."""

from __future__ import annotations

import math
import select
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.topology import Topology
from hvdlite.common.engine.engine import Engine
from hvdlite.common.engine.inbox import MOST_CYCLES, WAKING_BYTES, Inbox, waking_bytes
from hvdlite.common.engine.pending import PendingTable
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.wakeup import WakeUp
from tests.ranks import run_ranks

SOON = 0.001
pytestmark = pytest.mark.timeout(30)


NO_CORE = waking_bytes(Topology.single_host(2), cores=2)


def entry_of(name: str, size_bytes: int = 8) -> Entry:
    entry = Entry(Request(0, name, "allreduce", "float32", (1,)))
    entry.size_bytes = size_bytes
    return entry


class Gathering:
    """An inbox whose engine sleeps, a clock that is set by hand, and the times of its wake-ups."""

    def __init__(
        self,
        gather_seconds: float = SOON,
        *,
        enough: float = WAKING_BYTES,
        short_calls: Any = None,
        wake: Callable[[float], None] = lambda within: None,
        awake: bool = False,
    ) -> None:
        self.now = 0.0
        self.woken: list[float] = []
        self.inbox = Inbox(
            self._wake, gather_seconds, short_calls, clock=lambda: self.now, enough=enough
        )
        self._also = wake
        assert awake or self.inbox.may_sleep()

    def _wake(self, within: float) -> None:
        self._also(within)
        self.woken.append(self.now + within)

    def put(self, name: str, size_bytes: int = 8, *, waits: bool = False) -> Entry:
        entry = entry_of(name, size_bytes)
        self.inbox.put([entry], waits=waits)
        return entry


class ShortCalls:
    """Every entry is a short call, which is complete at once."""

    def run(self, entry: Entry) -> bool:
        entry.complete()
        return True

    def is_pending(self, entry: Entry) -> bool:
        return not entry.handle.poll()


@pytest.mark.parametrize(
    ("gather_seconds", "enough"),
    [(SOON, WAKING_BYTES), (SOON, NO_CORE), (0.0, WAKING_BYTES)],
    ids=["a core", "no core", "no cycle time"],
)
def test_the_first_tensor_sets_an_alarm_for_all(gather_seconds: float, enough: float) -> None:
    engine = Gathering(gather_seconds, enough=enough)
    for name in "abc":
        engine.put(name)
    assert engine.woken == [gather_seconds]
    if enough == WAKING_BYTES:
        assert len(engine.inbox.drain()) == 3
        assert engine.inbox.may_sleep()
        engine.put("d")
        assert engine.woken == [gather_seconds] * 2


def test_an_engine_that_is_awake_leaves_the_entry_of_a_thread_that_waits_next() -> None:
    engine = Gathering(short_calls=ShortCalls(), awake=True)
    other, kept = engine.put("other"), engine.put("kept", waits=True)
    assert engine.inbox.drain() == [other]
    assert engine.inbox.drain() == []
    assert engine.inbox.may_sleep()
    kept.handle.wait()  # It is a short call, or it would wait for ever.
    assert engine.inbox.drain(everything=True) == []


def test_an_entry_is_reported_though_a_signal_has_kept_its_thread_from_waiting() -> None:
    engine = Gathering(short_calls=ShortCalls(), awake=True)
    kept = engine.put("kept", waits=True)
    engine.now += SOON / 4
    assert engine.inbox.drain() == []
    assert engine.inbox.may_sleep()
    (engine.now,) = engine.woken
    assert engine.now == pytest.approx(SOON)
    assert engine.inbox.drain() == [kept]


@pytest.mark.parametrize("then", ["another comes", "it is waited for with a limit", "all go"])
def test_nothing_overtakes_an_entry_that_is_kept_and_nobody_waits_for_it_in_vain(then: str) -> None:
    engine = Gathering(short_calls=ShortCalls(), awake=True)
    expected = [engine.put("kept", waits=True)]
    if then == "another comes":
        expected.append(engine.put("next"))
    elif then == "it is waited for with a limit":
        expected[0].handle.ended_within(0)
    assert engine.inbox.may_sleep() == (then == "all go")
    assert engine.inbox.drain(everything=then == "all go") == expected


def test_an_entry_of_many_bytes_is_kept_from_nobody() -> None:
    engine = Gathering(short_calls=ShortCalls())
    entry = engine.put("large", WAKING_BYTES, waits=True)
    assert engine.woken == [0.0]
    assert engine.inbox.drain() == [entry]


def test_the_entries_of_a_group_are_not_kept() -> None:
    engine = Gathering(short_calls=ShortCalls(), awake=True)
    group = [entry_of(name) for name in "ab"]
    engine.inbox.put(group, waits=True)
    assert engine.inbox.drain() == group


def test_the_alarm_is_put_off_while_short_calls_follow_each_other() -> None:
    """The engine would wake for nothing; an entry that nobody waits for has its alarm in time."""
    engine = Gathering(short_calls=ShortCalls())

    def put(name: str) -> Entry:
        entry = engine.put(name)
        assert engine.now < engine.woken[-1] <= engine.now + SOON
        return entry

    for step in range(1000):
        put(f"short {step}").handle.wait()
        engine.now += SOON / 10
    assert len(engine.woken) <= 1000 // 5
    put("nobody waits")
    due = engine.woken[-1]
    for step in range(5):  # entries that come after it do not put it off
        engine.now += SOON / 10
        put(f"later {step}")
    assert engine.woken[-1] == due
    assert len(engine.inbox.drain()) == 6


def test_an_engine_that_is_awake_is_not_woken() -> None:
    engine = Gathering(awake=True)
    engine.put("a")
    assert not engine.woken
    assert not engine.inbox.may_sleep()


def test_who_waits_wakes_the_engine_once() -> None:
    engine = Gathering()
    first, second = engine.put("a"), engine.put("b")
    for entry in (first, second):
        assert not entry.handle.ended_within(0.01)
        threading.Thread(target=entry.handle.wait, daemon=True).start()
    assert engine.woken == [SOON, 0.0]
    for entry in engine.inbox.drain():
        entry.complete()
    assert first.handle.wait() is None
    assert engine.woken == [SOON, 0.0]


def test_who_wants_to_be_called_wakes_the_engine() -> None:
    engine = Gathering()
    engine.put("a").handle.on_end(lambda: None)
    assert engine.woken == [SOON, 0.0]


def test_many_bytes_wake_the_engine_at_once() -> None:
    engine = Gathering()
    for name, size_bytes in (("a", WAKING_BYTES - 1), ("b", 1), ("c", WAKING_BYTES)):
        engine.put(name, size_bytes)
    assert engine.woken == [SOON, 0.0]


def test_many_bytes_gather_on_where_the_engine_has_no_core_of_its_own() -> None:
    one, two = Topology.single_host(2), Topology(((0,), (1,)))
    assert waking_bytes(one, cores=3) == waking_bytes(two, cores=1) == WAKING_BYTES
    engine = Gathering(enough=NO_CORE)
    engine.put("a", 1 << 40)
    assert engine.woken == [SOON]
    engine.inbox.hurry()
    assert engine.woken == [SOON, 0.0]


def test_an_engine_without_a_core_is_not_woken_while_tensors_follow_each_other() -> None:
    """One negotiation for what a thread enqueues in a few milliseconds; no tensor waits longer."""
    engine = Gathering(enough=NO_CORE)
    came: list[float] = []
    waited: list[float] = []  # the first tensor of each round
    for number in range(100):
        came.append(engine.now)
        engine.put(str(number))
        engine.now += SOON / 10
        if engine.now >= engine.woken[-1]:
            waited.append(engine.now - came[0])
            assert len(engine.inbox.drain()) == len(came)
            assert engine.inbox.may_sleep()
            came.clear()
    assert len(waited) == 2
    assert max(waited) < (MOST_CYCLES + 0.5) * SOON


@pytest.mark.parametrize("then", ["a thread waits", "nothing comes", "all go"])
def test_a_message_of_another_rank_does_not_divide_what_a_thread_enqueues(then: str) -> None:
    """Its engine has no core, and is not to negotiate the first half of a step alone."""
    engine = Gathering(enough=NO_CORE)
    entries = []
    for name in "abc":
        entries.append(engine.put(name))
        engine.now += SOON / 20
        assert engine.inbox.drain() == []  # a message has come
        assert engine.inbox.may_sleep()
        assert engine.now < engine.woken[-1] <= engine.now + SOON
    if then == "a thread waits":
        assert not entries[1].handle.ended_within(0)
        assert engine.woken[-1] == engine.now
    elif then == "nothing comes":
        engine.now = engine.woken[-1]
    assert engine.inbox.drain(everything=then == "all go") == entries


def test_what_a_thread_waits_for_does_not_gather_with_what_comes_meanwhile() -> None:
    """Another thread enqueues between the note that somebody waits and the wake-up."""
    meanwhile = [entry_of("c")]
    engine = Gathering(
        enough=math.inf, wake=lambda within: None if within else engine.inbox.put(meanwhile)
    )
    entries = [engine.put("a"), engine.put("b"), *meanwhile]
    engine.now += SOON * 0.6  # The wake-up may be put off from now on.
    assert not entries[0].handle.ended_within(0)
    assert engine.inbox.drain() == entries
    assert engine.inbox.may_sleep()
    again = engine.put("again")
    assert engine.inbox.drain() == []  # Nobody waits for this one.
    assert engine.inbox.drain(gathers=False) == [again]


def test_entries_are_reported_before_an_order_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would wait for them until it has ended."""
    seen = set()
    report_entries = Engine._report_entries

    def note(engine: Engine, *, gathers: bool) -> None:
        seen.add((gathers, bool(engine._control_plane.orders)))
        report_entries(engine, gathers=gathers)

    def main(rank: int) -> None:
        for _ in range(10):
            hvd.synchronize(hvd.allreduce_async(np.ones(1000), name="x"))

    monkeypatch.setattr(Engine, "_report_entries", note)
    run_ranks(2, main)
    assert (False, True) in seen
    assert (True, True) not in seen


def test_a_message_of_another_rank_has_what_came_a_while_ago() -> None:
    engine = Gathering(enough=math.inf)
    entry = engine.put("computes meanwhile")
    engine.now += SOON / 2
    assert engine.inbox.drain() == [entry]


@pytest.mark.parametrize("who", ["the first tensor", "many bytes", "a thread that waits"])
def test_ctrl_c_just_before_a_wake_up_leaves_the_next_one_to_others(who: str) -> None:
    """An engine that nobody has woken is not taken for one that is awake."""
    interrupts: list[type[BaseException]] = []

    def interrupt(within: float) -> None:
        if interrupts:
            raise interrupts.pop()

    engine = Gathering(wake=interrupt)

    def come(name: str) -> None:
        entry = engine.put(name, WAKING_BYTES if who == "many bytes" else 8)
        if who == "a thread that waits":
            assert not entry.handle.ended_within(0)

    if who == "a thread that waits":
        engine.put("alarm")
        engine.woken.clear()
    interrupts.append(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        come("interrupted")
    assert engine.woken == []
    come("next")
    assert engine.woken == [SOON if who == "the first tensor" else 0.0]
    come("later")
    assert len(engine.woken) == 1


def test_a_wake_up_that_comes_late_is_not_taken_for_one_of_the_next_sleep() -> None:
    """The engine has drained and sleeps again before a thread has noted that it has woken it."""
    drained: list[list[Entry]] = []

    def drain(within: float) -> None:
        if not drained:
            drained.append(engine.inbox.drain())
            assert engine.inbox.may_sleep()

    engine = Gathering(wake=drain)
    engine.put("a")
    assert [len(each) for each in drained] == [1]
    engine.put("b")
    assert engine.woken == [SOON, SOON]


def test_what_nobody_waits_for_is_reduced_all_the_same() -> None:
    def main(rank: int) -> Any:
        handle = hvd.allreduce_async(np.ones(3), name="polled", op=hvd.Sum)
        while not hvd.poll(handle):
            threading.Event().wait(0.001)
        return hvd.synchronize(handle).tolist()

    assert run_ranks(2, main, config=Config(cycle_time_ms=5)) == [[2.0] * 3] * 2


def nested(lock: Any) -> None:
    """Take a lock that this thread has taken, as a signal handler does."""
    with lock:
        assert lock.acquire(blocking=False), "a signal handler would wait for ever here"
        lock.release()


def test_a_signal_handler_may_enqueue_and_wake_within_a_call_that_does() -> None:
    inbox, pending, wake_up = Inbox(lambda within: None), PendingTable(0), WakeUp()
    for each in (inbox, pending, wake_up):
        nested(each._lock)
    wake_up.close()


def test_a_handler_that_enqueues_inside_of_enqueuing_loses_nothing() -> None:
    """The handler runs in the midst of `add` and `put`, as a signal may come anywhere."""
    pending, inbox = PendingTable(0), Inbox(lambda within: None)

    class Interrupting(Entry):
        @property
        def size_bytes(self) -> int:  # type: ignore[override]
            if not done:
                done.append(True)
                pending.add([inner])
                inbox.put([inner])
            return 8

    done: list[bool] = []
    inner = Entry(Request(0, "inner", "allreduce"))
    outer = Interrupting(Request(0, "outer", "allreduce"))
    pending.add([outer])
    inbox.put([outer])
    assert {entry.request.name for entry in inbox.drain()} == {"inner", "outer"}
    assert pending.find(0, "inner") is inner and pending.find(0, "outer") is outer


def test_a_call_that_is_refused_adds_nothing() -> None:
    pending = PendingTable(0)
    entries = [Entry(Request(0, name, "allreduce")) for name in "abca"]
    with pytest.raises(ValueError, match="'a' on rank 0 has the same name"):
        pending.add(entries)
    pending.add(entries[:3])
    assert pending.pop([each.key for each in entries]) == [*entries[:3], None]


def readable(wake_up: WakeUp, milliseconds: int) -> bool:
    poll = select.poll()
    for descriptor in wake_up.descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(milliseconds))


@pytest.mark.parametrize("within", [0.0, 0.02])
def test_an_alarm_rings_until_it_is_silenced(within: float) -> None:
    wake_up = WakeUp()
    assert not readable(wake_up, 0)
    wake_up.trigger(within)
    assert readable(wake_up, 5000)
    assert readable(wake_up, 0)
    wake_up.clear()
    assert not readable(wake_up, 0)
    wake_up.close()


def test_a_silenced_alarm_forgets_what_is_to_come() -> None:
    wake_up = WakeUp()
    wake_up.trigger(0.05)
    wake_up.trigger()
    wake_up.clear()
    assert not readable(wake_up, 100)
    wake_up.close()


def test_an_alarm_may_be_set_for_longer_than_a_second() -> None:
    wake_up = WakeUp()
    wake_up.trigger(1.05)
    assert not readable(wake_up, 100)
    assert readable(wake_up, 5000)
    wake_up.close()


def test_an_alarm_that_is_closed_is_rung_in_vain() -> None:
    wake_up = WakeUp()
    wake_up.close()
    wake_up.close()
    for within in (0.0, 0.01):
        wake_up.trigger(within)
    wake_up.clear()
