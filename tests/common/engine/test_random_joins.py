"""Random programs of collectives, joins and departures on uneven hosts; the answers are numpy's.

A rank may join while collectives of its own are under way, and leave in the middle of a round.
"""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.decisions.control_tree import Tree
from hvdlite.common.engine import tree_links
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from tests.ranks import run_ranks
from tests.worlds import IN_PROCESS, TCP

SEEDS = 60
TCP_SEEDS = 12
COLLECTIVES = ("allreduce", "allgather", "allgather", "broadcast", "alltoall", "reducescatter",
               "grouped")  # fmt: skip


@lru_cache(maxsize=1024)  # Every rank asks for those of all others.
def numbers(seed: int, rank: int, round_: int, rows: int | None) -> Any:
    rng = np.random.default_rng([seed, rank, round_])
    if rows is None:
        rows = 1 + rank + (int(rng.integers(0, 4)) == 0)
    return rng.integers(0, 9, (rows, 2)).astype(np.float64)


@dataclass(frozen=True)
class Case:
    """One named collective, with what each rank puts in in each round."""

    name: str
    collective: str
    size: int
    root: int
    seed: int

    def input(self, rank: int, round_: int) -> Any:
        """Small whole numbers; the rows of an allgather now and then change on one rank alone."""
        rows = None if self.collective == "allgather" else 2 * self.size
        return numbers(self.seed, rank, round_, rows)

    def start(self, rank: int, round_: int) -> Any:
        tensor = self.input(rank, round_)
        if self.collective == "allreduce":
            return hvd.allreduce_async(tensor, name=self.name, op=hvd.Sum)
        if self.collective == "grouped":
            return hvd.grouped_allreduce_async([tensor, tensor + 1], name=self.name, op=hvd.Sum)
        if self.collective == "reducescatter":
            return hvd.reducescatter_async(tensor, name=self.name, op=hvd.Sum)
        if self.collective == "broadcast":
            return hvd.broadcast_async(tensor, self.root, name=self.name)
        if self.collective == "alltoall":
            return hvd.alltoall_async(tensor, [2] * self.size, name=self.name)
        return hvd.allgather_async(tensor, name=self.name)

    def expected(self, rank: int, round_: int, ranks: list[int]) -> Any:
        """What `rank` gets where only `ranks` have not joined."""
        inputs = [self.input(each, round_) for each in ranks]
        own = slice(2 * rank, 2 * rank + 2)
        if self.collective == "broadcast":
            return self.input(self.root, round_)
        if self.collective == "allgather":
            return np.concatenate(inputs)
        if self.collective == "alltoall":
            return np.concatenate([each[own] for each in inputs])
        total = np.sum(inputs, 0)
        if self.collective == "grouped":
            return np.concatenate([total, total + len(ranks)])
        return total[own] if self.collective == "reducescatter" else total

    def result(self, handle: Any) -> Any:
        result = hvd.synchronize(handle)
        if self.collective == "alltoall":
            return result[0]
        return np.concatenate(result) if self.collective == "grouped" else result


class Program:
    """What all ranks do, made from one seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.size = rng.randint(2, 6)
        cuts = sorted(rng.sample(range(1, self.size), rng.randint(0, self.size - 1)))
        ends = [0, *cuts, self.size]
        self.hosts = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
        self.fan_out = rng.choice([1, 2, 32])
        self.config = Config(
            cache_capacity=rng.choice([0, 3, 8, 1024]),
            fusion_threshold_bytes=rng.choice([0, 256, 1 << 20]),
            cycle_time_ms=rng.choice([0.0, 0.0, 1.0]),
            stall_check_disable=True,
        )
        # Of each epoch: how many rounds each rank takes part in before it joins.
        self.epochs = [
            [rng.randint(0, 3) for _ in range(self.size)] for _ in range(rng.randint(1, 4))
        ]
        self.cases = [
            [
                Case(
                    f"case.{number}", rng.choice(COLLECTIVES), self.size,
                    max(range(self.size), key=rounds.__getitem__), rng.randrange(1 << 30),
                )
                for number in range(rng.randint(1, 8))
            ]
            for rounds in self.epochs
        ]  # fmt: skip
        self.leaver = rng.randrange(self.size) if rng.random() < 0.6 else None
        self.jitter = rng.choice([0.0, 0.0005, 0.003])
        # Whether all calls come in one order, and each is waited for: those may be short calls.
        self.waits = rng.random() < 0.4
        if self.waits and rng.random() < 0.7:
            self.hosts = [list(range(self.size))]
        self.seed = seed

    def run(self, rank: int) -> None:
        rng = random.Random(self.seed * 100 + rank)
        for epoch, rounds in enumerate(self.epochs):
            started: list[tuple[Case, int, Any]] = []
            for round_ in range(rounds[rank]):
                started = self.start(epoch, rank, round_, rng)
                if round_ < rounds[rank] - 1 or rng.random() < 0.3:
                    self.finish(epoch, rank, started, rng)
                    started = []
            self.pause(rng)
            hvd.join()
            self.finish(epoch, rank, started, rng)
        if self.leaver is not None:
            self.leave_or_fail(rank, rng)

    def start(
        self, epoch: int, rank: int, round_: int, rng: random.Random
    ) -> list[tuple[Case, int, Any]]:
        started: list[tuple[Case, int, Any]] = []
        count = len(self.cases[epoch])
        for case in self.cases[epoch] if self.waits else rng.sample(self.cases[epoch], count):
            self.pause(rng)
            started.append((case, round_, case.start(rank, round_)))
            if self.waits and rng.random() < 0.9:
                self.finish(epoch, rank, started, rng)
                started = []
        return started

    def finish(
        self, epoch: int, rank: int, started: list[tuple[Case, int, Any]], rng: random.Random
    ) -> None:
        for case, round_, handle in rng.sample(started, len(started)):
            ranks = [r for r in range(self.size) if self.epochs[epoch][r] > round_]
            expected = case.expected(rank, round_, ranks)
            np.testing.assert_array_equal(case.result(handle), expected, case.name)

    def leave_or_fail(self, rank: int, rng: random.Random) -> None:
        """One rank leaves after some calls; the others get right answers, or its number."""
        cases = rng.sample(self.cases[0], rng.randint(0, len(self.cases[0])))
        if rank == self.leaver:
            for case in cases:
                case.start(rank, 0)
            self.pause(rng)
            current().shutdown()
            return
        words = f"rank {self.leaver} has been shut down"
        handles = [(case, case.start(rank, 0)) for case in cases]
        self.pause(rng)
        with pytest.raises(hvd.HorovodInternalError, match=words):
            hvd.join()
        for case, handle in handles:
            try:
                result = case.result(handle)
            except hvd.HorovodInternalError as error:
                rootless = f"root rank {case.root} has joined"  # before it has called this
                assert words in str(error) or rootless in str(error), str(error)
            else:  # some may have joined meanwhile, but never the one that leaves
                assert result.dtype == np.float64

    def pause(self, rng: random.Random) -> None:
        if self.jitter:
            threading.Event().wait(rng.random() * self.jitter)


def play(seed: int, monkeypatch: pytest.MonkeyPatch, transport: str = IN_PROCESS) -> None:
    program = Program(seed)
    monkeypatch.setattr(tree_links, "Tree", partial(Tree, fan_out=program.fan_out))
    run_ranks(
        program.size, program.run, hosts=program.hosts, config=program.config, transport=transport
    )


@pytest.mark.timeout(180)
def test_random_programs_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(TCP_SEEDS):
        play(seed, monkeypatch, TCP)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_random_programs(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 10):
        play(seed, monkeypatch)
