"""Messages between two ranks: what arrives, in any order, and what is said when it cannot."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.api.process_group_calls import recv, recv_async, send, send_async
from hvdlite.common.collectives.native import short_call
from hvdlite.common.collectives.native.library import library
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.runtime.current import current, use
from hvdlite.common.runtime.formed_sets import form_process_set, release_process_set
from hvdlite.common.settings.config import Config
from hvdlite.tools.timeline_reader import check
from tests.backends import DTYPES, values
from tests.ranks import run_ranks, run_threads
from tests.short_calls import short_calls, until
from tests.worlds import IN_PROCESS, TCP

pytestmark = pytest.mark.timeout(120)

HOSTS = [None, [[0, 1], [2, 3]], [[0, 2], [1], [3]]]
QUIET = Config(stall_check_disable=True)
WAYS = {
    "compiled": (None, IN_PROCESS, Config()),
    "compiled, tcp": (HOSTS[1], TCP, Config()),
    "python": (None, TCP, Config(native="off")),
    "python, hosts": (HOSTS[2], IN_PROCESS, Config(native="off")),
    "ring": (None, IN_PROCESS, Config(data_plane="ring")),
    "ring, tcp": (HOSTS[2], TCP, Config(data_plane="ring")),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_arrives(way: str) -> None:
    """Every dtype, from 0 bytes to some pieces; the others wait in a barrier, in no common set."""
    hosts, transport, config = WAYS[way]
    cases = [(dtype, 5) for dtype in DTYPES] + [("float32", n) for n in (0, 1, 1023, 400_000)]

    def main(rank: int) -> None:
        for number, (dtype, size) in enumerate(cases):
            sender, receiver = number % 4, (number + 1 + number % 3) % 4
            data = values(number, size, dtype)
            if rank == sender:
                send(data, receiver, f"message {number}")
            elif rank == receiver:
                target = np.zeros_like(data)
                assert recv(target, sender, f"message {number}") is target
                assert target.tobytes() == data.tobytes()
        hvd.barrier()

    run_ranks(4, main, hosts=hosts, transport=transport, config=config)


def test_shapes_may_differ_and_memory_need_not_be_contiguous() -> None:
    def main(rank: int) -> None:
        data = np.arange(24.0).reshape(4, 6)
        if rank == 0:
            send(data.T, 1, "transposed")
            send(data[::2, ::3], 1, "a part")
            data.flags.writeable = False
            send(data, 1, "read only")
        else:
            target = np.zeros((5, 24))
            assert recv(target[1], 0, "transposed").tolist() == data.T.reshape(-1).tolist()
            assert not target[[0, 2, 3, 4]].any()
            recv(target[:4, 7], 0, "a part")
            assert target[:4, 7].tolist() == [0, 3, 12, 15]
            assert recv(np.zeros((2, 12)), 0, "read only").reshape(-1).tolist() == list(range(24))

    run_ranks(2, main)


@pytest.mark.parametrize(
    ("hosts", "transport"), [(None, IN_PROCESS), (HOSTS[1], TCP), (HOSTS[2], IN_PROCESS)]
)
def test_random_programs_of_messages_and_collectives(hosts: Any, transport: str) -> None:
    """Each rank starts its part in its own order; some parts wait, in a thread of their own."""
    plan = random.Random(3)
    steps = []
    for number in range(120):
        sender, receiver = plan.sample(range(4), 2)
        kind = plan.choice(["message"] * 4 + ["allreduce", "form"])
        steps.append((number, kind, sender, receiver, plan.choice([1, 3, 700, 40_000])))

    def start(rank: int, step: Any) -> Any:
        """A function that waits for the step, and checks its result."""
        number, kind, sender, receiver, size = step
        data = np.arange(size) * (number + 1)
        if kind == "allreduce":
            handle = hvd.allreduce_async(data + rank, op=hvd.Sum, name=f"{number}")
            return lambda: np.testing.assert_array_equal(
                hvd.synchronize(handle), 4 * data + 6, f"{step}"
            )
        if rank not in (sender, receiver) or kind == "form":
            return lambda: None
        if rank == sender:
            return send_async(data, receiver, f"{number}").wait
        target = np.zeros_like(data)
        operation = recv_async(target, sender, f"{number}")

        def check() -> None:
            operation.wait()
            np.testing.assert_array_equal(target, data, f"{step}")

        return check

    def main(rank: int) -> None:
        order = random.Random(rank)
        for first in range(0, len(steps), 40):
            part = steps[first : first + 40]
            waits = [start(rank, step) for step in order.sample(part, len(part))]
            for _, kind, sender, receiver, _ in part:
                if kind == "form" and rank in (sender, receiver):
                    release_process_set(form_process_set([sender, receiver]))
            for wait in order.sample(waits, len(waits)):
                wait()

    run_ranks(4, main, hosts=hosts, transport=transport)


def test_both_ways_at_the_same_time_and_in_many_threads() -> None:
    def main(rank: int) -> None:
        runtime = current()

        def thread(number: int) -> None:
            with use(runtime):
                for step in range(20):
                    name = f"{number}.{step}"
                    target = np.zeros(3)
                    if (number + rank) % 2:
                        send(np.full(3, float(step)), 1 - rank, name)
                    else:
                        assert recv(target, 1 - rank, name).tolist() == [step] * 3

        run_threads(4, thread)

    run_ranks(2, main)


@pytest.mark.parametrize("hosts", HOSTS)
def test_sizes_dtypes_and_directions_that_disagree_are_named(hosts: Any) -> None:
    def main(rank: int) -> None:
        cases: list[tuple[str, Any, Any]] = [
            ("number of elements: rank 1 has 3, rank 2 has 4", np.ones(3), np.ones(4)),
            ("data type: rank 1 has float64, rank 2 has float32", np.ones(3), np.ones(3, "f")),
            ("data type: rank 1 has int64, rank 2 has float64", np.ones(2, int), np.ones(2)),
        ]
        for number, (words, given, target) in enumerate(cases):
            for call, data in ((1, given), (2, target)):
                if rank == call:
                    with pytest.raises(hvd.HorovodInternalError, match=words) as failure:
                        (send if rank == 1 else recv)(data, 3 - rank, f"case {number}")
                    assert f"case {number}" in str(failure.value)
                    assert failure.value.job_goes_on
        hvd.barrier()

    run_ranks(4, main, hosts=hosts, config=QUIET)


def test_what_is_wrong_at_the_call() -> None:
    def main(rank: int) -> None:
        if rank:
            return
        for peer in (0, 2, -1, True, "1", None):
            with pytest.raises(ValueError, match=r"one of the ranks 0 to 1, and not 0 itself"):
                send(np.ones(1), peer, "x")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="is not supported"):
            send(np.array(["a"]), 1, "x")
        with pytest.raises(ValueError, match="cannot be sent to other ranks"):
            send(np.ones(1), 1, "\ud800")
        frozen = np.ones(1)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            recv(frozen, 1, "x")
        first = recv_async(np.ones(1), 1, "x")
        with pytest.raises(ValueError, match="the same name"):
            recv_async(np.ones(1), 1, "x")
        assert not first.poll()

    run_ranks(2, main)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("how", ["shutdown", "death"])
def test_a_message_of_a_rank_that_has_left_fails(how: str, hosts: Any) -> None:
    gone, ready = threading.Event(), threading.Barrier(4)

    def main(rank: int) -> None:
        hvd.barrier()
        ready.wait(30)  # The death of a rank may overtake the end of a barrier.
        if rank == 3:
            if how == "shutdown":
                current().shutdown()
            else:
                current().transport.close()
            gone.set()
            return
        assert gone.wait(30)
        words = "rank 3 (has been shut down|is gone)|connection to rank 3 was lost"
        if rank == 1:
            with pytest.raises(hvd.HorovodInternalError, match=words):
                recv(np.ones(1), 3, "never")
        if how == "shutdown":  # the others go on
            peer = {0: 2, 2: 0}.get(rank)
            if peer is not None:
                mine, other = (send, recv) if rank == 0 else (recv, send)
                mine(np.ones(2), peer, "there")
                other(np.ones(2), peer, "back")

    run_ranks(4, main, hosts=hosts, config=QUIET)


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_that_has_joined_gets_what_it_asked_for_before_and_nothing_more(hosts: Any) -> None:
    def main(rank: int) -> None:
        if rank == 2:
            target = np.zeros(2)
            before = recv_async(target, 1, "before")
            hvd.join()
            before.wait()
            assert target.tolist() == [1, 1]
            return
        if rank == 0:
            states = current().engine._control_plane._coordinator._sets
            until(lambda: states[0].join)
        hvd.allreduce(np.ones(1), name="rank 2 has joined")
        if rank == 1:
            send(np.ones(2), 2, "before")
            with pytest.raises(hvd.HorovodInternalError, match=r"rank 2 has called join\(\)"):
                send(np.ones(2), 2, "after")
            send(np.ones(2), 3, "others")
        elif rank == 3:
            assert recv(np.zeros(2), 1, "others").tolist() == [1, 1]
        hvd.join()

    run_ranks(4, main, hosts=hosts, config=QUIET)


def test_a_message_is_one_negotiation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two ranks reports it once, and one order comes down."""
    orders: list[Any] = []
    reports: list[Any] = []
    pop, receive = Coordinator.pop_orders, Coordinator.receive

    def counted_pop(self: Coordinator) -> Any:
        popped = pop(self)
        orders.extend(each for each in popped if "point_to_point" in str(each))
        return popped

    def counted_receive(self: Coordinator, report: Any, now: float) -> None:
        reports.extend(each for each in report.requests if each.collective == "point_to_point")
        receive(self, report, now)

    monkeypatch.setattr(Coordinator, "pop_orders", counted_pop)
    monkeypatch.setattr(Coordinator, "receive", counted_receive)

    def main(rank: int) -> None:
        for number in range(10):
            if rank:
                (send if rank == 1 else recv)(np.ones(9), 3 - rank, f"{number}")
        hvd.barrier()

    run_ranks(3, main, hosts=[[0], [1], [2]])
    assert (len(reports), len(orders)) == (20, 10)


def test_the_timeline_shows_a_message_to_its_two_ranks_alone(tmp_path: Path) -> None:
    settings = Config(timeline=str(tmp_path / "t.json"), timeline_all_ranks=True)

    def main(rank: int) -> None:
        if rank:
            (send if rank == 1 else recv)(np.ones(9), 3 - rank, "x")
            release_process_set(form_process_set([1, 2]))
        hvd.barrier()

    run_ranks(3, main, config=settings)
    for rank in range(3):
        events = json.loads((tmp_path / f"t.rank{rank}.json").read_text())
        assert check(events).problems == []
        names = {event["args"].get("name") for event in events if event["ph"] == "M"}
        assert ("point_to_point.1.2.x" in names) == (rank > 0)
        assert ("form_process_set.[1, 2]" in names) == (rank > 0)


# -- short calls


needs_compiler = pytest.mark.skipif(library("auto") is None, reason="there is no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("transport", [IN_PROCESS, TCP])
def test_small_messages_inside_a_host_pass_by_the_coordinator(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_call, "TIMEOUT_SECONDS", 20.0)

    def main(rank: int) -> None:
        hvd.barrier()
        # An engine that has just ended the barrier would take the first message.
        until(lambda: current().engine._inbox._engine.name != "AWAKE")
        before = short_calls().completed
        for step in range(30):
            data = np.random.default_rng(step).standard_normal((1, 700, 100_000)[step % 3])
            for sender in (0, 1):
                if rank == sender:
                    send(data, 1 - rank, f"{step}.{sender}")
                else:
                    got = recv(np.zeros_like(data), sender, f"{step}.{sender}")
                    assert got.tobytes() == data.tobytes()
        assert short_calls().completed - before == 60

    run_ranks(2, main, transport=transport, config=Config(cycle_time_ms=60_000))


@needs_compiler
def test_who_waits_and_who_does_not_find_each_other_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One side reports what the other one makes a short call of: nobody waits out the limit."""
    monkeypatch.setattr(short_call, "TIMEOUT_SECONDS", 0.5)  # Far more than a busy machine needs.

    def main(rank: int) -> float:
        hvd.barrier()
        start = time.monotonic()
        for step in range(60):
            target = np.zeros(4)
            if rank == step % 2:
                operation = send_async(np.full(4, step), 1 - rank, f"{step}")
                current().engine._inbox.hurry()
                until(operation.poll)
            else:
                assert recv(target.astype(int), 1 - rank, f"{step}").tolist() == [step] * 4
        return time.monotonic() - start

    assert max(run_ranks(2, main)) < 30 * short_call.TIMEOUT_SECONDS


@needs_compiler
def test_a_name_that_comes_again_is_a_short_call_again() -> None:
    def main(rank: int) -> int:
        hvd.barrier()
        for step in range(100):
            for sender in (0, 1):
                if rank == sender:
                    send(np.full(2, step), 1 - rank, "again")
                else:
                    assert recv(np.zeros(2, int), 1 - rank, "again").tolist() == [step] * 2
        return int(short_calls().completed)

    assert min(run_ranks(2, main)) > 20
