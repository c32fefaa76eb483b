"""Schedules as data: every member ends with every value once, in one order of summation."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest

from hvdlite.common.collectives.between_hosts.schedules import (
    Move,
    Scheduler,
    doubling,
    halving,
    halving_doubling,
    place_in_tree,
    recursive_doubling,
    tree_depth,
    two_trees,
)

SIZES = range(1, 41)


SCHEDULERS: dict[str, Scheduler] = {
    "halving": halving_doubling, "trees": two_trees, "doubling": recursive_doubling,
}  # fmt: skip


class Machine:
    """Members that exchange sums as text: "(0+1)" is what member 0 has, and has got from 1."""

    def __init__(self, scheduler: Scheduler, size: int) -> None:
        self.schedules = [scheduler(size, index) for index in range(size)]
        self.sums: list[list[Any]] = [
            [index for _ in schedule.layout] for index, schedule in enumerate(self.schedules)
        ]
        self.results: list[dict[int, Any]] = [{} for _ in range(size)]
        self.messages: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.sent: list[Counter[int]] = [Counter() for _ in range(size)]  # blocks, by receiver
        self.message_counts = [0] * size

    def run(self) -> None:
        """Let every member go on until it waits, in turns, until none goes on."""
        programs = [self._program(index) for index in range(len(self.schedules))]
        waiting = dict(enumerate(programs))
        while waiting:
            moved = False
            for index, program in list(waiting.items()):
                for step in program:
                    if not step:
                        break
                    moved = True
                else:
                    del waiting[index]
                    moved = True
            assert moved, f"members {[*waiting]} wait for each other"
        assert not any(self.messages.values()), "a message that nobody receives"

    def _program(self, index: int) -> Any:
        schedule = self.schedules[index]
        for each in schedule.rounds:
            for move in each.sends:
                self._send(index, move)
                yield True
            for move in each.receives:
                while not self.messages[move.peer, index]:
                    yield False
                self._receive(index, move)
                yield True
            for start, stop in each.finished:
                for place in range(start, stop):
                    self.results[index][place] = self.sums[index][place]

    def _send(self, index: int, move: Move) -> None:
        held = self.sums[index] if move.partial else self.results[index]
        blocks = self.schedules[index].layout[move.start : move.stop]
        body = [held[place] for place in range(move.start, move.stop)]
        self.messages[index, move.peer].append((move.partial, blocks, body))
        self.sent[index][move.peer] += len(blocks)
        self.message_counts[index] += 1

    def _receive(self, index: int, move: Move) -> None:
        partial, blocks, body = self.messages[move.peer, index].popleft()
        assert partial == move.partial
        assert blocks == self.schedules[index].layout[move.start : move.stop]
        assert 0 < len(blocks) <= self.schedules[index].widest
        for place, value in zip(range(move.start, move.stop), body, strict=True):
            if partial:
                later = not (move.mutual and move.peer < index)
                sums = self.sums[index][place], value
                self.sums[index][place] = sums if later else sums[::-1]
            else:
                self.results[index][place] = value

    def by_block(self, index: int) -> dict[int, Any]:
        """The results of a member."""
        if not self.schedules[index].rounds:
            return dict.fromkeys(self.schedules[index].layout, index)
        return {self.schedules[index].layout[p]: v for p, v in self.results[index].items()}


def leaves(value: Any) -> list[int]:
    """The members whose values a sum holds."""
    return [value] if isinstance(value, int) else [n for part in value for n in leaves(part)]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_member_ends_with_every_value_once_and_the_same_sums(name: str) -> None:
    for size in SIZES:
        machine = Machine(SCHEDULERS[name], size)
        machine.run()
        first = machine.by_block(0)
        assert sorted(first) == sorted(machine.schedules[0].layout)
        for value in first.values():
            assert sorted(leaves(value)) == list(range(size))
        for index in range(size):
            assert machine.by_block(index) == first, f"member {index} of {size}"
        assert len({len(schedule.rounds) for schedule in machine.schedules}) == 1


def test_the_halves_scatter_and_gather() -> None:
    """The sums are those of the whole allreduce, and each block reaches each member once."""
    for size in SIZES[1:]:
        whole, first, second = (
            Machine(scheduler, size) for scheduler in (halving_doubling, halving, doubling)
        )
        for index in range(size):
            second.results[index][0] = index  # Its own block.
        for machine in (whole, first, second):
            machine.run()
        for index in range(size):
            assert first.by_block(index) == {index: whole.by_block(0)[index]}
            assert second.by_block(index) == {block: block for block in range(size)}
            assert first.sent[index].total() == second.sent[index].total() == size - 1
            assert first.schedules[index].reduces and not second.schedules[index].reduces


@pytest.mark.parametrize(
    ("name", "rounds", "most_blocks", "of"),
    [
        ("halving", lambda n: 2 * (n - 1).bit_length(), lambda n: 2 * (n - 1), lambda n: n),
        ("trees", lambda n: 2 * tree_depth(n), lambda n: 4, lambda n: 2),
        ("doubling", lambda n: (n - 1).bit_length() + (n & (n - 1) > 0),
         lambda n: (n - 1).bit_length(), lambda n: 1),
    ],
)  # fmt: skip
def test_price_in_rounds_and_bytes(
    name: str,
    rounds: Callable[[int], int],
    most_blocks: Callable[[int], int],
    of: Callable[[int], int],
) -> None:
    for size in SIZES[1:]:
        machine = Machine(SCHEDULERS[name], size)
        machine.run()
        for index, schedule in enumerate(machine.schedules):
            assert len(schedule.rounds) == rounds(size)
            assert len(schedule.layout) == of(size)
            assert machine.sent[index].total() <= most_blocks(size)
        if size > 4:  # A tree of fewer members has no node with a parent and two children.
            assert max(sent.total() for sent in machine.sent) == most_blocks(size)


@pytest.mark.parametrize(
    ("name", "most"),
    [("halving", 21), ("trees", 4), ("doubling", 11)],
)
def test_peers_of_a_host_among_2048(name: str, most: int) -> None:
    peers = [len(SCHEDULERS[name](2048, index).peers) for index in range(0, 2048, 97)]
    assert max(peers) == most


def test_who_is_inside_one_tree_is_a_leaf_of_the_other() -> None:
    for size in SIZES:
        for member in range(size):
            places = [place_in_tree(size, tree, member) for tree in range(2)]
            assert not all(place.children for place in places), (size, member)
            assert all(place.level <= tree_depth(size) for place in places)


def test_few_edges_of_a_tree_are_long() -> None:
    for size in (64, 100, 1023):
        for tree in range(2):
            edges = [(m, place_in_tree(size, tree, m).parent) for m in range(size)]
            lengths = [abs(m - parent) for m, parent in edges if parent is not None]
            near = sum(min(length, size - length) <= 2 for length in lengths)
            assert near >= 0.7 * size


def test_halves_need_a_pair_only_where_the_number_is_two() -> None:
    first, last = halving_doubling(2, 0).rounds
    assert first.sends == (Move(1, 1, 2, True),)
    assert first.receives == (Move(1, 0, 1, True),)
    assert last.sends == (Move(1, 0, 1, False),)
