"""Process sets between two worlds: who knows what, and what all agree on."""

from __future__ import annotations

import random

import pytest

from hvdlite.common.driver_link.frames import World
from hvdlite.common.requests.process_set_table import ProcessSetTable
from hvdlite.common.runtime.elastic_worker import KeptSets
from hvdlite.common.runtime.process_sets import ProcessSet


def world(epoch: int, *numbers: int) -> World:
    return World(epoch, 0, tuple((each, "a") for each in numbers), 0, (), 0)


class Worker:
    """One worker with its table and its objects, as the runtime holds them."""

    def __init__(self, *init: ProcessSet) -> None:
        self.sets = KeptSets()
        self.sets.note_init(init)
        self.table = ProcessSetTable(0)
        self.objects: dict[int, ProcessSet] = {}

    def add(self, process_set: ProcessSet) -> None:
        process_set_id = self.table.add(process_set.ranks or ())
        process_set._bind(process_set_id, process_set.ranks or ())
        self.objects[process_set_id] = process_set

    def remove(self, process_set: ProcessSet) -> None:
        assert process_set.process_set_id is not None
        self.table.remove(process_set.process_set_id)
        del self.objects[process_set.process_set_id]
        process_set._invalidate()

    def leave(self, old: World) -> None:
        self.sets.note_world(old, self.table.all(), self.objects)
        for process_set in self.objects.values():
            process_set._invalidate()


def enter(new: World, *workers: Worker) -> None:
    """All workers, in rank order, begin a world."""
    bodies = [worker.sets.pack() for worker in workers]
    agreed = [worker.sets.agree(bodies, new) for worker in workers]
    assert agreed == [agreed[0]] * len(workers)
    for worker in workers:
        worker.table = ProcessSetTable(new.size, agreed[0])
        worker.objects = worker.sets.bind(worker.table.all())


def begin(old: World, *ranks: list[int]) -> list[Worker]:
    """Workers in their first world, which have made these sets by `init`."""
    workers = [Worker(*map(ProcessSet, ranks)) for _ in old.members]
    enter(old, *workers)
    for worker in workers:
        for position in range(len(ranks)):
            worker.add(worker.sets._objects[0, position])
    return workers


def test_ranks_follow_the_workers_and_ids_their_order() -> None:
    first = world(1, 10, 11, 12, 13)
    a, b, _, d = begin(first, [0, 1], [1, 2, 3], [2], [3])
    for worker in (a, b, d):
        worker.leave(first)
    held = [a.sets._objects[0, position] for position in range(4)]
    lists = [each.ranks for each in held]
    enter(world(2, 13, 10, 11), d, a, b)
    assert [(each.process_set_id, each.ranks) for each in held] == [
        (1, [1, 2]), (2, [0, 2]), (None, []), (3, [0])
    ]  # fmt: skip
    assert all(each.ranks is ranks for each, ranks in zip(held, lists, strict=True))
    assert a.table.all() == {0: [0, 1, 2], 1: [1, 2], 2: [0, 2], 3: [0]}


def test_newcomers_begin_with_the_same_table_and_know_the_sets_of_init() -> None:
    first = world(1, 0, 1, 2)
    a, b, _ = begin(first, [0, 1])
    for worker in (a, b):
        worker.add(ProcessSet([1]))
        worker.leave(first)
    of_init = ProcessSet([0, 1])
    newcomer = Worker(of_init)
    second = world(2, 0, 1, 7)
    enter(second, a, b, newcomer)
    assert newcomer.table.all() == {0: [0, 1, 2], 1: [0, 1], 2: [1]}
    assert newcomer.objects == {1: of_init}
    # They tell them on when all who have made them are gone but one.
    b.leave(second)
    newcomer.leave(second)
    enter(world(3, 1, 7), b, newcomer)
    assert newcomer.table.all() == b.table.all() == {0: [0, 1], 1: [0], 2: [0]}


def test_losses_may_make_sets_equal() -> None:
    first = world(1, 0, 1, 2)
    a, _, _ = begin(first, [0, 1], [0, 2])
    a.leave(first)
    enter(world(2, 0), a)
    assert a.table.all() == {0: [0], 1: [0], 2: [0]}
    with pytest.raises(ValueError, match="duplicate"):
        a.table.check([0])


@pytest.mark.parametrize("adds", [True, False], ids=["added", "removed"])
def test_a_set_that_only_some_have_added_or_removed_is_dropped(adds: bool) -> None:
    first = world(1, 0, 1, 2)
    workers = begin(first, [0], [1])[:2]
    changed = ProcessSet([0, 1]) if adds else workers[0].sets._objects[0, 1]
    (workers[0].add if adds else workers[0].remove)(changed)
    others = workers[1].sets._objects[0, 1]
    for worker in workers:
        worker.leave(first)
    enter(world(2, 0, 1), *workers)
    kept = {0: [0, 1], 1: [0], 2: [1]} if adds else {0: [0, 1], 1: [0]}
    assert workers[0].table.all() == workers[1].table.all() == kept
    assert changed.process_set_id is None
    assert (others.process_set_id is None) == (not adds)


def test_a_worker_that_has_missed_a_world_agrees_with_the_others() -> None:
    """World 2 stood on worker 0 only, when worker 1 failed to enter it."""
    first = world(1, 0, 1, 2)
    a, b, _ = begin(first, [0, 1], [2], [1, 2])
    for worker in (a, b):
        worker.leave(first)
    second = world(2, 0, 1)
    enter(second, a, b)
    a.leave(second)
    enter(world(3, 0, 1), a, b)
    assert a.table.all() == b.table.all() == {0: [0, 1], 1: [0, 1], 2: [1]}


def test_many_worlds() -> None:
    """Sets as Python sets of workers are the oracle, in the order in which they were made."""
    randomly = random.Random(3)
    now = world(1, *range(5))
    workers = dict(enumerate(begin(now)))
    oracle: list[set[int]] = []
    newest = 5
    for epoch in range(2, 60):
        ranks = sorted(randomly.sample(range(now.size), randomly.randint(1, now.size)))
        if ranks not in workers[now.numbers[0]].table.all().values():
            for worker in workers.values():
                worker.add(ProcessSet(ranks))
            oracle.append({now.numbers[rank] for rank in ranks})
        for worker in workers.values():
            worker.leave(now)
        kept = randomly.sample(now.numbers, randomly.randint(1, now.size))
        coming = range(newest, newest + randomly.randint(0, 2))
        newest = coming.stop
        now = world(epoch, *sorted(kept), *coming)
        workers = {each: workers.get(each) or Worker() for each in now.numbers}
        enter(now, *(workers[each] for each in now.numbers))
        oracle = [left for each in oracle if (left := each & set(kept))]
        tables = [
            [{now.numbers[rank] for rank in ranks} for ranks in worker.table.added()]
            for worker in workers.values()
        ]
        assert tables == [oracle] * len(workers)
