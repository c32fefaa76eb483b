"""Tables of a server, without sockets: updates against numpy; workers and servers return."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hvdlite.ps.connections.messages import Answer, Message, head_of, pack, parse
from hvdlite.ps.layouts.blocks import Array, Block, TensorSpec, blocks_of
from hvdlite.ps.layouts.layout import place
from hvdlite.ps.tables.clocks import ASYNC, SSP, SYNC, Mode
from hvdlite.ps.tables.description import TableDescription, describe_table
from hvdlite.ps.tables.table import Table, TableFailedError, TableLostError
from hvdlite.ps.tables.updater import Added, add_up

SPECS = [TensorSpec("a", "float32", (5,)), TensorSpec("b", "bfloat16", (3, 2), group=1)]


class Momentum:
    """An optimizer with a state."""

    def begin(self, values: Sequence[Array]) -> None:
        self.arrays = list(values)
        self.momenta = [np.zeros_like(array) for array in values]

    def values(self) -> list[Array]:
        return self.arrays

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        rate = numbers[0]["lr"] if numbers else 0.5
        for array, momentum, gradient in zip(self.arrays, self.momenta, gradients, strict=True):
            momentum[...] = momentum * array.dtype.type(0.5) + gradient
            array[...] = array - momentum * array.dtype.type(rate)

    def state(self) -> dict[str, Array]:
        return {str(number): momentum.copy() for number, momentum in enumerate(self.momenta)}

    def load(self, state: Mapping[str, Array]) -> None:
        for number, momentum in enumerate(self.momenta):
            momentum[...] = state[str(number)]


def blocks() -> list[Block]:
    layout = place([spec.size for spec in SPECS], [spec.itemsize for spec in SPECS], 1)
    return blocks_of(SPECS, 0, layout, 0)


def new_table(mode: Mode, incarnation: int = 1) -> Table:
    described = TableDescription("t", describe_table(SPECS, blocks(), mode, average=True))
    return Table(described, Momentum(), incarnation=incarnation)


def values_of(step: int, worker: int) -> list[Array]:
    made = np.random.default_rng([step + 1, worker])
    return [made.normal(size=5).astype(np.float32), made.normal(size=6).astype(ml_dtypes.bfloat16)]


def payloads(arrays: Sequence[Array]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


def over_a_network(message: Message) -> Message:
    (arrived,) = parse(head_of([pack(message)[0]]))
    return arrived


class Worker:
    """A worker that sends until it is answered, over a network that repeats and reorders."""

    def __init__(self, number: int, workers: Sequence[int]) -> None:
        self.number, self.workers = number, workers
        self.step, self.version = 0, -1
        self.first: int | None = None  # The worker that has declared the table, where it matters.
        self.values = values_of(-1, 0)
        self.kinds: list[str] = []

    def send(self, table: Table, message: Message) -> list[Answer]:
        peer = b"w%d" % self.number
        message = over_a_network(message)
        if message.kind == "start":
            return table.start(peer, self.number, message, self.workers)
        if message.kind == "offer":
            return table.offer(peer, self.number, message)
        call = table.push if message.kind == "push" else table.pull
        return call(peer, self.number, message)

    def start(self, table: Table, *, returns: bool = False) -> list[Answer]:
        body = {"version": self.version, "first": self.first}
        if not returns and self.version >= 0:
            body["clock"] = self.step
        return self.send(table, Message("start", body=body))

    def push(self, table: Table, body: Mapping[str, Any] | None = None) -> list[Answer]:
        arrays = payloads(values_of(self.step, self.number))
        return self.send(table, Message("push", clock=self.step, body=body or {}, payloads=arrays))

    def pull(self, table: Table, clock: int) -> list[Answer]:
        return self.send(table, Message("pull", clock=clock))

    def hear(self, table: Table, message: Message) -> list[Answer]:
        self.kinds.append(message.kind)
        if message.kind == "wanted":
            return self.send(table, Message("offer", payloads=payloads(self.values)))
        if message.kind == "values":
            self.version = message.clock
            self.values = [
                block.view(data).copy()
                for block, data in zip(blocks(), message.payloads, strict=True)
            ]
        if message.kind == "started":
            self.step = message.body["clock"]
        return []


def deliver(table: Table, workers: Mapping[bytes, Worker], answers: list[Answer]) -> None:
    while answers:
        peer, message = answers.pop(0)
        answers += workers[peer].hear(table, over_a_network(message))


def train_in_one(steps: int, workers: Sequence[int], numbers: Sequence[Any] = ()) -> list[Array]:
    """Return what numpy makes of the sums of all workers' gradients."""
    alone = Momentum()
    alone.begin(values_of(-1, 0))
    for step in range(steps):
        terms = [values_of(step, worker) for worker in workers]
        total = [
            sum((term[0] for term in terms[1:]), terms[0][0]) * np.float32(1 / len(terms)),
            (
                sum(
                    (term[1].astype(np.float32) for term in terms[1:]),
                    terms[0][1].astype(np.float32),
                )
                * np.float32(1 / len(terms))
            ).astype(ml_dtypes.bfloat16),
        ]
        alone.step(total, numbers)
    return alone.values()


def assert_same(found: Sequence[Array], wanted: Sequence[Array]) -> None:
    assert [array.tobytes() for array in found] == [array.tobytes() for array in wanted]


def job(count: int) -> dict[bytes, Worker]:
    return {b"w%d" % number: Worker(number, range(count)) for number in range(count)}


def start_all(table: Table, workers: Mapping[bytes, Worker]) -> None:
    for worker in workers.values():
        deliver(table, workers, worker.start(table))


def started(mode: Mode, count: int) -> tuple[Table, dict[bytes, Worker]]:
    """Return a new table in which so many workers take part."""
    table, workers = new_table(mode), job(count)
    start_all(table, workers)
    return table, workers


def run_step(table: Table, workers: Mapping[bytes, Worker], choose: random.Random) -> None:
    """Let all workers push and pull, in a random order, and repeat some messages."""
    order = list(workers.values())
    choose.shuffle(order)
    for worker in order:
        for _ in range(choose.choice([1, 1, 2])):
            deliver(table, workers, worker.push(table))
        worker.step += 1
        deliver(table, workers, worker.pull(table, worker.step))


def begun(mode: Mode, workers: int = 2) -> Table:
    table = new_table(mode)
    for worker in range(workers):
        body = {"worker": worker, "version": -1}
        answers = table.start(b"%d" % worker, worker, Message("start", body=body), range(workers))
        if answers and answers[0].message.kind == "wanted":
            offer = Message("offer", payloads=payloads(values_of(-1, 0)))
            table.offer(b"%d" % worker, worker, offer)
    return table


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sync_is_bitwise_a_sum_in_rank_order_in_one_process(count: int) -> None:
    choose, (table, workers) = random.Random(count), started(Mode(SYNC), count)
    for _ in range(10):
        run_step(table, workers, choose)
    for worker in workers.values():
        assert_same(worker.values, train_in_one(10, range(count)))
        assert worker.version == 10


def test_a_late_worker_does_not_change_what_was_answered() -> None:
    table, workers = started(Mode(ASYNC), 2)
    first, second = workers.values()
    (answer,) = first.pull(table, 0)
    before = bytes(answer.message.payloads[0])
    deliver(table, workers, second.push(table))
    assert bytes(answer.message.payloads[0]) == before
    deliver(table, workers, first.pull(table, 0))
    assert first.values[0].tobytes() != before


@pytest.mark.parametrize("mode", [Mode(ASYNC), Mode(SSP, 4)])
def test_a_pull_that_overtakes_its_push_is_answered_with_it(mode: Mode) -> None:
    """A push may be sent again while the pull that was sent behind it arrives at once."""
    table, workers = new_table(mode), job(1)
    (worker,) = workers.values()
    deliver(table, workers, worker.start(table))
    before = worker.values[0].tobytes()
    assert worker.pull(table, 1) == []
    deliver(table, workers, worker.push(table))
    assert worker.kinds[-2:] == ["pushed", "values"]
    assert worker.values[0].tobytes() != before


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_server_that_returns_takes_the_newest_values(
    every: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The values are never older than any worker's; with each version saved, nothing is lost.

    Else it is said that the optimizer's state is older.
    """
    choose, (table, workers) = random.Random(seed), started(Mode(SYNC), 3)
    for step in range(7):
        if step % every == 0:
            saved = table.copy()
        run_step(table, workers, choose)
    # Some have pushed the next step, which is lost with the server.
    pushed = [worker for worker in workers.values() if choose.random() < 0.5][:2]
    for worker in pushed:
        deliver(table, workers, worker.push(table))
    if every == 1:
        saved = table.copy()
    table = new_table(Mode(SYNC), incarnation=2)
    table.restore(saved)
    for worker in workers.values():
        (refused,) = worker.push(table)
        assert (refused.message.kind, refused.message.incarnation) == ("restarted", 2)
    start_all(table, workers)
    assert table.version == 7
    assert_same(table.updater.values(), train_in_one(7, range(3)))
    assert_same(list(table.updater.state().values()), list(saved.state.values()))
    run_step(table, workers, choose)
    assert all(worker.version == 8 for worker in workers.values())
    if every == 1:
        assert_same(table.updater.values(), train_in_one(8, range(3)))
    told = [] if saved.version == 7 else [f"momenta, is that of version {saved.version}"]
    assert [
        each.getMessage().split(", such as ")[1].split(". ")[0] for each in caplog.records
    ] == told


def test_a_server_that_returns_has_the_hyperparameters_of_its_workers() -> None:
    """They send them when they change, and the snapshot is older."""
    table, (worker,) = new_table(Mode(SYNC)), job(1).values()
    workers = {b"w0": worker}
    deliver(table, workers, worker.start(table))
    deliver(table, workers, worker.push(table, {"numbers": [{"lr": 2.0}]}))
    saved = table.copy()
    table = new_table(Mode(SYNC), incarnation=2)
    table.restore(saved)
    body = {"version": 1, "clock": 1, "numbers": [{"lr": 0.25}]}
    deliver(table, workers, worker.send(table, Message("start", body=body)))
    assert table.copy().numbers == [{"lr": 0.25}]


@pytest.mark.parametrize(("momentum", "loads"), [(True, False), (False, False), (True, True)])
def test_a_state_that_nobody_has_kept_begins_anew_and_that_is_said(
    momentum: bool, loads: bool, caplog: pytest.LogCaptureFixture
) -> None:
    table, workers = started(Mode(SYNC), 2)
    for _ in range(3):
        run_step(table, workers, random.Random(0))
    table = new_table(Mode(SYNC), incarnation=2)
    table.reached = 3
    if not momentum:
        table.updater = Added()
    start_all(table, workers)
    assert (table.version, caplog.text) == (3, "")
    if loads:  # With a state of its own.
        saved = table.copy()
        table.take_loaded(saved.values, saved.state, 7, 3, {0: 3, 1: 3}, workers=[0, 1])
        start_all(table, workers)
    for _ in range(2):
        run_step(table, workers, random.Random(0))
    text = "from version 3 with the values of worker 0, .* such as momenta, has begun anew"
    said = int(momentum and not loads)
    assert (len(re.findall(text, caplog.text)), caplog.text.count("momenta")) == (said, said)


def test_workers_that_are_ahead_of_all_values_are_told_to_go_back() -> None:
    table, workers = started(Mode(SYNC), 2)
    saved = table.copy()
    for _ in range(3):
        run_step(table, workers, random.Random(0))
    table = new_table(Mode(SYNC), 2)
    table.restore(saved)
    for worker in workers.values():
        worker.version = 0  # nobody has kept newer values
        deliver(table, workers, worker.start(table))
    assert [worker.kinds[-1] for worker in workers.values()] == ["rolled_back"] * 2
    for worker in workers.values():
        worker.step = 0
    for _ in range(3):
        run_step(table, workers, random.Random(0))
    assert_same(table.updater.values(), train_in_one(3, range(2)))


@pytest.mark.parametrize("pushed", [False, True])
def test_a_worker_that_returns_goes_on_at_its_step(pushed: bool) -> None:
    table, workers = started(Mode(SYNC), 2)
    for _ in range(4):
        run_step(table, workers, random.Random(0))
    if pushed:
        deliver(table, workers, workers[b"w1"].push(table))
    workers[b"w1"] = new = Worker(1, range(2))
    deliver(table, workers, new.start(table, returns=True))
    deliver(table, workers, workers[b"w0"].push(table))
    deliver(table, workers, new.pull(table, new.step))
    assert new.step == (5 if pushed else 4)
    assert (new.version, table.version) == (new.step, new.step)
    assert_same(new.values, train_in_one(new.step, range(2)))


def test_a_table_that_has_just_come_serves_its_first_step_again() -> None:
    """Nobody has pulled its version here; another server lacks the push of a lost worker."""
    before, workers = started(Mode(SYNC), 2)
    for _ in range(2):
        run_step(before, workers, random.Random(0))
    table = new_table(Mode(SYNC))
    table.adopt(before.copy())
    for worker in workers.values():
        deliver(table, workers, worker.start(table))
        deliver(table, workers, worker.push(table))
    assert table.version == 3
    workers[b"w1"] = again = Worker(1, range(2))
    deliver(table, workers, again.start(table, returns=True))
    deliver(table, workers, again.pull(table, 2))
    assert_same(again.values, train_in_one(2, range(2)))
    deliver(table, workers, again.pull(table, 3))
    assert_same(again.values, train_in_one(3, range(2)))


def test_workers_that_leave_do_not_hold_the_others_up() -> None:
    table, workers = started(Mode(SYNC), 3)
    for number in (0, 1):
        deliver(table, workers, workers[b"w%d" % number].push(table))
        deliver(table, workers, workers[b"w%d" % number].pull(table, 1))
    assert table.version == 0
    deliver(table, workers, table.leave(2))
    assert table.version == 1
    assert_same(workers[b"w0"].values, train_in_one(1, range(2)))


def test_nothing_is_updated_without_a_worker_that_starts_late() -> None:
    table, workers = new_table(Mode(SYNC)), job(2)
    first, second = workers.values()
    deliver(table, workers, first.start(table))
    deliver(table, workers, first.push(table))
    assert table.version == 0
    deliver(table, workers, second.start(table))
    deliver(table, workers, second.push(table))
    assert (second.step, table.version) == (0, 1)


def test_the_offer_of_a_worker_that_has_gone_is_not_waited_for() -> None:
    table, workers = new_table(Mode(SYNC)), job(2)
    assert workers[b"w0"].start(table)[0].message.kind == "wanted"
    table.leave(0)
    deliver(table, workers, workers[b"w1"].start(table))
    assert workers[b"w1"].kinds == ["wanted", "started"]


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_first_values_are_those_of_one_worker_in_whatever_order_they_come(
    mode: str, order: list[int]
) -> None:
    table, workers = new_table(Mode(mode)), job(3)
    for number in order:
        worker = workers[b"w%d" % number]
        worker.first = 1
        deliver(table, workers, worker.start(table))
    assert [worker.kinds[0] for worker in workers.values()] == ["started", "wanted", "started"]


def test_all_wait_for_each_other_where_the_first_worker_is_lost() -> None:
    """Each server then takes the values of the same one, whoever comes first."""
    table, workers = new_table(Mode(SYNC)), job(3)
    for worker in workers.values():
        worker.first, worker.workers = 0, [1, 2]
    deliver(table, workers, workers[b"w2"].start(table))
    assert not workers[b"w2"].kinds
    deliver(table, workers, workers[b"w1"].start(table))
    assert workers[b"w1"].kinds[0] == "wanted"
    assert workers[b"w2"].kinds == ["started"]


def test_a_worker_that_is_lost_after_its_start_is_not_waited_for() -> None:
    table, workers = new_table(Mode(SYNC)), job(2)
    first, second = workers.values()
    first.first = second.first = 0
    assert first.start(table)[0].message.kind == "wanted"
    second.workers = [1]
    assert not table.look([1])
    deliver(table, workers, second.start(table))
    assert second.kinds == ["wanted", "started"]


@pytest.mark.parametrize("lost", ["wanted", "started"])
def test_each_answer_of_the_beginning_may_be_lost(lost: str) -> None:
    """A worker asks again what was not answered, and gets what it lacks."""
    table, workers = new_table(Mode(SYNC)), job(2)
    first, second = workers.values()
    wanted = first.start(table)
    deliver(table, workers, second.start(table))
    if lost == "wanted":
        wanted = first.start(table)
    answers = first.hear(table, wanted[0].message)
    if lost == "started":
        answers = first.hear(table, wanted[0].message) + second.start(table)
    deliver(table, workers, answers)
    assert table.begun
    assert first.kinds[-1] == second.kinds[-1] == "started"
    for worker in (first, second):
        deliver(table, workers, worker.push(table))
    assert table.version == 1


def test_a_server_that_has_forgotten_all_takes_the_newest_values() -> None:
    """The worker that has them may be the last to start."""
    table, workers = new_table(Mode(SYNC), incarnation=2), job(2)
    first, second = workers.values()
    first.version, first.step = 3, 3
    second.version, second.step, second.values = 4, 4, values_of(7, 7)
    assert first.start(table) == []
    deliver(table, workers, second.start(table))
    assert table.version == 4 and first.kinds == ["started"]
    assert_same(table.updater.values(), second.values)


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_first_values_do_not_come_again_while_somebody_may_have_newer_ones(mode: str) -> None:
    """A worker that has come again starts first, with first values."""
    table, workers = new_table(Mode(mode), incarnation=2), job(2)
    table.reached = 4
    first, second = workers.values()
    second.version, second.step, second.values = 4, 4, values_of(7, 7)
    assert first.start(table) == []
    deliver(table, workers, second.start(table))
    assert_same(table.updater.values(), second.values)


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_what_nobody_has_any_more_is_an_error(mode: str) -> None:
    table, workers = new_table(Mode(mode), incarnation=2), job(2)
    table.reached = 4
    first, second = workers.values()
    assert first.start(table) == []
    with pytest.raises(TableLostError, match=r"the table 't' had version 4, .*ps\.load"):
        second.start(table)


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_a_new_table_is_begun_by_one_worker_on_a_server_that_was_here_before(mode: str) -> None:
    table, workers = new_table(Mode(mode), incarnation=2), job(2)
    deliver(table, workers, workers[b"w0"].start(table))
    assert workers[b"w0"].kinds == ["wanted", "started"]


def test_bounded_staleness_holds_the_fast_one_up() -> None:
    table, workers = started(Mode(SSP, 2), 2)
    fast, slow = workers.values()
    for step in range(3):
        fast.step = step
        deliver(table, workers, fast.push(table))
        deliver(table, workers, fast.pull(table, step + 1))
    assert fast.kinds.count("values") == 2
    deliver(table, workers, slow.push(table))
    assert fast.kinds.count("values") == 3


@pytest.mark.parametrize("mode", [Mode(ASYNC, None, "1/W"), Mode(SSP, 5, "1/W")])
def test_each_push_is_divided_by_the_workers_that_take_part(mode: Mode) -> None:
    table, workers = started(mode, 3)
    alone = Momentum()
    alone.begin(values_of(-1, 0))

    def push(worker: Worker, count: int) -> None:
        own, short = values_of(worker.step, worker.number)
        rate = np.float32(1 / count)
        scaled = (short.astype(np.float32) * rate).astype(ml_dtypes.bfloat16)
        alone.step([own * rate, scaled], ())
        deliver(table, workers, worker.push(table))
        worker.step += 1

    first, second, third = workers.values()
    for worker in (first, third, second, third):
        push(worker, 3)
    table.leave(1)
    push(first, 2)
    table.look([0])  # One more is lost, as the scheduler says.
    push(first, 1)
    deliver(table, workers, second.start(table))  # It comes again.
    push(second, 2)
    deliver(table, workers, first.pull(table, first.step))
    assert_same(first.values, alone.values())


@pytest.mark.parametrize("mode", [Mode(SYNC), Mode(ASYNC)])
def test_a_push_that_was_sent_before_a_load_is_not_taken_after_it(mode: Mode) -> None:
    """The process that has sent it was lost; one that lives starts again, and sends it again."""
    table, workers = started(mode, 2)
    first, second = workers.values()
    assert [each.message.kind for each in first.push(table)] == ["pushed"]
    first.step = 1
    loaded = values_of(5, 5)
    state = {str(number): np.zeros_like(array) for number, array in enumerate(loaded)}
    copies = [array.copy() for array in loaded]
    table.take_loaded(copies, state, 7, 0, {0: 0, 1: 0}, workers=[0, 1])
    first.step = 0
    for worker in (first, second):
        assert [each.message.kind for each in worker.push(table)] == ["restarted"]
    assert table.version == (0 if mode.name == SYNC else 1)
    assert_same(table.copy().values, loaded)
    for worker in (first, second):
        deliver(table, workers, worker.start(table))
        deliver(table, workers, worker.push(table))
    wanted = Momentum()
    wanted.begin([array.copy() for array in loaded])
    terms = [values_of(0, 0), values_of(0, 1)]
    if mode.name == SYNC:
        blocks_of_both = zip(*terms, strict=True)
        wanted.step([add_up(list(each), average=True) for each in blocks_of_both], [])
    else:
        for term in terms:
            wanted.step(term, [])
    assert_same(table.copy().values, wanted.values())


def test_in_async_the_hyperparameters_that_came_last_count() -> None:
    """For the pushes of all workers, whoever has sent them."""
    table, workers = started(Mode(ASYNC), 2)
    alone = Momentum()
    alone.begin(values_of(-1, 0))
    first, second = workers.values()
    for worker, sent, rate in [
        (first, 0.25, 0.25), (second, None, 0.25), (second, 2.0, 2.0), (first, None, 2.0),
        (first, 0.5, 0.5), (second, None, 0.5),
    ]:  # fmt: skip
        alone.step(values_of(worker.step, worker.number), [{"lr": rate}])
        body = {} if sent is None else {"numbers": [{"lr": sent}]}
        deliver(table, workers, worker.push(table, body))
        worker.step += 1
    deliver(table, workers, first.pull(table, first.step))
    assert_same(first.values, alone.values())


def test_an_overflow_of_one_skips_the_step_of_all() -> None:
    table, workers = started(Mode(SYNC), 2)
    deliver(table, workers, workers[b"w0"].push(table))
    skip = Message("push", clock=0, body={"skip": True})
    deliver(table, workers, workers[b"w1"].send(table, skip))
    assert table.version == 1
    assert_same(table.updater.values(), values_of(-1, 0))


class Leaver(Momentum):
    """Takes note of what each step is to leave as it is."""

    def __init__(self) -> None:
        self.left: list[Sequence[Sequence[slice]]] = []

    def leave(self, spans: Sequence[Sequence[slice]]) -> None:
        self.left.append(spans)


@pytest.mark.parametrize("mode", [Mode(SYNC), Mode(ASYNC), Mode(SSP, 1)])
def test_tensors_that_no_push_of_an_update_has_are_left_out(mode: Mode) -> None:
    updater = Leaver()
    described = TableDescription("t", describe_table(SPECS, blocks(), mode, average=True))
    table, workers = Table(described, updater, incarnation=1), job(2)
    start_all(table, workers)
    for absent in (([1], [0, 1]), ([0], [1]), ([], [0])):
        for worker, own in zip(workers.values(), absent, strict=True):
            for _ in range(2):  # It comes again, and does not count again.
                deliver(table, workers, worker.push(table, {"absent": own}))
            worker.step += 1
    first, second = [slice(0, 5)], [slice(0, 6)]
    of_each = [[[], second], [first, second], [first, []], [[], second], [first, []]]
    assert updater.left == (of_each[:1] if mode.name == SYNC else of_each)
    assert table.version == (3 if mode.name == SYNC else 6)


@pytest.mark.parametrize("mode", [Mode(SYNC), Mode(ASYNC), Mode(ASYNC, None, "1/W")])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_passed_on(mode: Mode, wrong: float) -> None:
    """Only the elements that it is about, and only by the worker that has it."""
    table, workers = started(mode, 2)
    for number, worker in enumerate(workers.values()):
        gradient = [np.ones(5, np.float32), np.ones(6, ml_dtypes.bfloat16)]
        for array in gradient:
            array[2] = wrong if number else 1
        worker.send(table, Message("push", clock=0, payloads=payloads(gradient)))
        worker.step = 1
    for worker in workers.values():
        deliver(table, workers, worker.pull(table, 1))
        for array in worker.values:
            found = array.astype(np.float64)
            assert np.isfinite(np.delete(found, 2)).all()
            np.testing.assert_equal(found[2], -wrong)


def test_sums_have_the_dtype_of_their_terms() -> None:
    ones = [np.full(3, 256, ml_dtypes.bfloat16), *[np.ones(3, ml_dtypes.bfloat16)] * 4]
    assert add_up(ones, average=False).tolist() == [260] * 3  # one by one, 256 would stay
    assert add_up([np.array([3], np.int32)] * 2, average=True).dtype == np.int32


class Broken(Momentum):
    """Steps, but where it is told to: then it raises when the step is half made."""

    def __init__(self, *good: int) -> None:
        self.good, self.made = good, 0

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        if self.made not in self.good:
            self.arrays[0] += 1
            raise RuntimeError("it divides by 0")
        super().step(gradients, numbers)
        self.made += 1


@pytest.mark.parametrize("mode", [Mode(SYNC), Mode(ASYNC), Mode(SSP, 1)])
def test_an_optimizer_that_fails_is_said_to_all_and_its_step_counts_nowhere(
    mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    table, workers = new_table(mode), job(2)
    table.updater = Broken(*range(1 if mode.name == SYNC else 2))
    start_all(table, workers)
    run_step(table, workers, random.Random(0))
    version = table.version
    answers = []
    for worker in workers.values():
        answers += worker.push(table)
        worker.step += 1
        answers += worker.pull(table, worker.step)
    wanted = f"the update from version {version} has failed .*RuntimeError\\('it divides by 0'\\)"
    failed = [each for each in answers if each.message.kind == "failed"]
    assert {each.peer for each in failed} == {b"w0", b"w1"}
    assert "values" not in {each.message.kind for each in answers}
    (why,) = {each.message.body["why"] for each in failed}
    assert re.search(wanted, why)
    assert caplog.text.count("in step\n") == 1  # The traceback.
    assert table.version == version
    with pytest.raises(TableFailedError, match=f"the table 't': {wanted}"):
        table.copy()
    # Whatever comes later hears the same, and a worker that is lost completes no step.
    worker = workers[b"w0"]
    later = [*worker.push(table), *worker.pull(table, 1), *worker.start(table)]
    assert [(each.message.kind, each.message.body["why"]) for each in later] == [
        ("failed", why)
    ] * 3
    assert table.look([0]) == table.leave(1) == []


@pytest.mark.parametrize("is_restored", [False, True])
def test_an_optimizer_that_does_not_take_its_values_is_said_to_all(is_restored: bool) -> None:
    table, workers = new_table(Mode(SYNC)), job(2)

    def begin(_: Sequence[Array]) -> None:
        raise MemoryError

    table.updater.begin = begin  # type: ignore[method-assign]
    if is_restored:
        other, _ = started(Mode(SYNC), 2)
        table.restore(other.copy())
    start_all(table, workers)
    assert [worker.kinds[-1] for worker in workers.values()] == ["failed", "failed"]


def test_a_pull_that_cannot_be_answered_disturbs_no_other() -> None:
    """Not even where its answer waits for what another worker sends."""
    table, workers = started(Mode(SYNC), 2)
    first, second = workers.values()
    first.push(table)
    first.pull(table, 1)
    copy_of, missing = table.copy_of, [True]

    def copy_once(array: Array) -> Array:
        if table.version == 1 and missing and missing.pop():
            raise MemoryError
        return copy_of(array)

    table.copy_of = copy_once
    answers = second.push(table)
    assert [(each.peer, each.message.kind) for each in answers] == [
        (b"w1", "pushed"), (b"w0", "failed")
    ]  # fmt: skip
    assert "MemoryError" in answers[1].message.body["why"]
    for worker in workers.values():
        deliver(table, workers, worker.pull(table, 1))
        assert_same(worker.values, train_in_one(1, [0, 1]))
