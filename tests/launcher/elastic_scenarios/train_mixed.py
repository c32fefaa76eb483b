"""A script of the scenarios: collectives of all kinds are in flight at once, and checked by numpy.

There are more names than the response cache holds. Each step reduces in process sets as well: those
of the first ranks 0 and 2, and of 1 and 3, as far as they live. A step counts if all was right.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.common.runtime import lifecycle, worlds
from tests.launcher.elastic_scenarios import faults

STEPS = int(os.environ["STEPS"])
HOLD_STEP, HOLD_SIZE = map(int, os.environ.get("HOLD", "-1 0").split())
JOIN_STEP = int(os.environ.get("JOIN", "-1"))  # At which one rank joins in the first world.
ELEMENTS = 3000
Waiting = list[tuple[int, Any]]
Sets = list[tuple[hvd.ProcessSet, list[int]]]  # With the numbers of their first members.


def members() -> list[int]:
    """Return the numbers of the workers of this world in rank order."""
    world = worlds.current_world()
    assert world is not None
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
    return [number for number, _ in world.members]


def own(number: int, step: int, which: int) -> Any:
    """Return what a worker gives in a step: whole numbers."""
    return np.arange(ELEMENTS, dtype=np.float64) % 97 + 1000 * number + 10 * step + which


def begin_reductions(numbers: list[int], step: int) -> Waiting:
    """Begin allreduces, alone and in groups, and Adasum; return handles with what must come."""
    waiting: Waiting = []
    for which in range(6):
        total = sum(own(number, step, which) for number in numbers)
        handle = hvd.allreduce_async(own(faults.NUMBER, step, which), op=hvd.Sum, name=f"t{which}")
        waiting.append((handle, total))
    group = [own(faults.NUMBER, step, which) for which in (7, 8)]
    handle = hvd.grouped_allreduce_async(group, op=hvd.Average, name="group")
    sums = [sum(own(number, step, which) for number in numbers) for which in (7, 8)]
    waiting.append((handle, [total / len(numbers) for total in sums]))
    # Without a name: which one it gets is counted, anew in each world.
    handle = hvd.allreduce_async(own(faults.NUMBER, step, 6), op=hvd.Sum)
    waiting.append((handle, sum(own(number, step, 6) for number in numbers)))
    # Vectors at right angles are added; that of another world has another length.
    axis = np.zeros(len(numbers))
    axis[hvd.rank()] = faults.NUMBER + 1
    handle = hvd.allreduce_async(axis, op=hvd.Adasum, name=f"adasum.{len(numbers)}")
    waiting.append((handle, np.array(numbers) + 1.0))
    return waiting


def begin_exchanges(numbers: list[int], step: int) -> Waiting:
    """Begin what moves rows between ranks; return handles with what must come."""
    rank, size = hvd.rank(), hvd.size()
    rows = np.full((rank + 1, 2), faults.NUMBER, np.int64)
    gathered = [np.full((r + 1, 2), number) for r, number in enumerate(numbers)]
    splits = np.arange(1, size + 1, dtype=np.int32)  # So many rows for each rank.
    sent = np.full(int(splits.sum()), 100 * faults.NUMBER + step, np.int64)
    came = [np.full(rank + 1, 100 * number + step) for number in numbers]
    shared = np.tile(np.arange(2.0 * size), (1, 1)).reshape(size * 2) * (faults.NUMBER + 1)
    scattered = np.arange(2.0 * size)[2 * rank : 2 * rank + 2] * sum(n + 1 for n in numbers)
    return [
        (hvd.allgather_async(rows, name="rows"), np.concatenate(gathered)),
        (hvd.alltoall_async(sent, splits, name="all"), (np.concatenate(came), [rank + 1] * size)),
        (hvd.reducescatter_async(shared, op=hvd.Sum, name="parts"), scattered),
        (hvd.broadcast_async(np.array([numbers[-1]]), size - 1, name="last"), [numbers[-1]]),
    ]


def begin_in_sets(sets: Sets, numbers: list[int], step: int) -> Waiting:
    """Begin an allreduce in the set of this worker, which has the ranks of this world."""
    waiting: Waiting = []
    for process_set, first in sets:
        living = [number for number in first if number in numbers]
        if not living:
            assert process_set.process_set_id is None
            continue
        assert process_set.ranks == [numbers.index(number) for number in living], process_set
        if faults.NUMBER in living:
            handle = hvd.allreduce_async(
                own(faults.NUMBER, step, 9), op=hvd.Sum, name="set", process_set=process_set
            )
            waiting.append((handle, sum(own(number, step, 9) for number in living)))
    return waiting


def check(came: Any, expected: Any) -> None:
    """Compare arrays, or lists of them."""
    if isinstance(expected, (list, tuple)) and not isinstance(came, np.ndarray):
        assert len(came) == len(expected)
        for left, right in zip(came, expected, strict=True):
            check(left, right)
    else:
        np.testing.assert_allclose(came, expected, rtol=1e-13)


def join_or_reduce() -> None:
    """Let the last rank join, and the others reduce until one of them is lost."""
    if hvd.rank() == hvd.size() - 1:
        hvd.join()
    while True:
        sums = hvd.allreduce(np.ones(3), op=hvd.Sum, name="no more")
        if sums[0] < hvd.size():
            faults.at("one has joined")


@hvd.elastic.run
def train(state: Any, sets: Sets) -> None:
    """Go on to the last step."""
    numbers = members()
    world = worlds.current_world()
    assert world is not None
    faults.say(entered=world.epoch, members=numbers, rank=hvd.rank(), step=state.step)
    first = True
    faults.at_step(state.step)
    while state.step < STEPS:
        if state.step == HOLD_STEP and hvd.size() < HOLD_SIZE:
            state.check_host_updates()
            continue
        if state.step == JOIN_STEP and world.epoch == 1:
            join_or_reduce()
        waiting = begin_reductions(numbers, state.step)
        faults.at("half begun")
        waiting += begin_exchanges(numbers, state.step)
        waiting += begin_in_sets(sets, numbers, state.step)
        faults.at("all begun")
        for handle, expected in waiting:
            check(hvd.synchronize(handle), expected)
        if first:
            faults.say(reduced=world.epoch)
            first = False
        state.history.append([state.step, numbers])
        state.step += 1
        faults.at_step(state.step)
        faults.say(done=state.step)
        state.commit()


def main() -> None:
    """Train; the first workers know two sets, newcomers none."""
    hvd.init()
    sets: Sets = []
    if not lifecycle.is_waiting():
        for ranks in ([0, 2], [1, 3]):
            sets.append((hvd.add_process_set(ranks), [members()[rank] for rank in ranks]))
    fields: dict[str, Any] = {"step": 0, "history": []}
    state = hvd.elastic.NumpyState(**fields)
    train(state, sets)
    weight = sum((n + 1) * (step + 1) for step, numbers in state.history for n in numbers)
    faults.say(result=weight, history=state.history, rank=hvd.rank(), size=hvd.size())


if __name__ == "__main__":
    main()
