"""Every rank enqueues the same tensors in its own random order; the answers are numpy's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.lists import split_rows
from hvdlite.common.settings.config import Config
from tests.ranks import run_ranks
from tests.worlds import IN_PROCESS, TCP

SIZE = 3
TENSORS = 120
DTYPES = ["uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool",
          "complex64"]  # fmt: skip
MIB = 1 << 20


@cache  # Every rank asks for those of all others.
def numbers(rank: int, round_: int, rows: int, columns: int) -> Any:
    return np.random.default_rng([rank, round_, rows, columns]).integers(0, 3, (rows, columns))


@dataclass(frozen=True)
class Case:
    """One named collective."""

    name: str
    collective: str
    dtype: str
    rows: int
    columns: int
    root: int

    def input(self, rank: int, round_: int) -> Any:
        """Small whole numbers, so that every dtype holds the sums exactly."""
        rows = self.rows + rank if self.collective == "allgather" else self.rows
        values = numbers(rank, round_, rows, self.columns)
        dtype = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype
        return values.astype(dtype)

    def start(self, tensor: Any) -> int:
        if self.collective == "allreduce":
            return hvd.allreduce_async(tensor, name=self.name, op=hvd.Sum)
        if self.collective == "reducescatter":
            return hvd.reducescatter_async(tensor, name=self.name, op=hvd.Sum)
        if self.collective == "broadcast":
            return hvd.broadcast_async(tensor, self.root, name=self.name)
        if self.collective == "alltoall":
            return hvd.alltoall_async(tensor, self.splits(), name=self.name)
        return hvd.allgather_async(tensor, name=self.name)

    def splits(self) -> list[int]:
        return split_rows(self.rows, SIZE)

    def expected(self, rank: int, round_: int) -> Any:
        inputs = [self.input(each, round_) for each in range(SIZE)]
        if self.collective == "broadcast":
            return inputs[self.root]
        if self.collective == "allgather":
            return np.concatenate(inputs)
        ends = np.cumsum(self.splits())
        own = slice(ends[rank] - self.splits()[rank], ends[rank])
        if self.collective == "alltoall":
            return np.concatenate([each[own] for each in inputs])
        total = sum(each.astype("complex128") for each in inputs)
        if self.dtype == "bool":
            total = total != 0
        elif self.dtype != "complex64":
            total = total.real
        total = total.astype(inputs[0].dtype)
        return total[own] if self.collective == "reducescatter" else total


def make_cases(seed: int) -> list[Case]:
    rng = random.Random(seed)
    collectives = ["allreduce"] * 4 + ["allgather", "broadcast", "alltoall", "reducescatter"]
    return [
        Case(
            name=f"tensor.{number}",
            collective=rng.choice(collectives),
            dtype=rng.choice(DTYPES),
            rows=rng.choice([0, 1, 2, 3, 5, 17, 64]),
            columns=rng.choice([1, 3, 7, 31, 257]),
            root=rng.randrange(SIZE),
        )
        for number in range(TENSORS)
    ]


@pytest.mark.parametrize(
    ("threshold_bytes", "cache_capacity", "transport"),
    [
        *((0, 1024, IN_PROCESS), (1024, 0, TCP), (1024, 50, IN_PROCESS), (64 * MIB, 50, TCP)),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in [
                *((0, 0, IN_PROCESS), (0, 50, TCP), (1024, 1024, TCP)),
                *((64 * MIB, 0, IN_PROCESS), (64 * MIB, 1024, IN_PROCESS)),
            ]
        ),
    ],
)
def test_any_order_of_enqueuing_gives_the_same_answers(
    threshold_bytes: int, cache_capacity: int, transport: str
) -> None:
    cases = make_cases(threshold_bytes + cache_capacity)

    def main(rank: int) -> None:
        order = random.Random(rank)
        for round_ in range(3):
            shuffled = order.sample(cases, len(cases))
            handles = {case: case.start(case.input(rank, round_)) for case in shuffled}
            for case in order.sample(cases, len(cases)):
                result = hvd.synchronize(handles[case])
                if case.collective == "alltoall":
                    result, received = result
                    assert received.tolist() == [case.splits()[rank]] * SIZE
                np.testing.assert_array_equal(result, case.expected(rank, round_), case.name)

    config = Config(fusion_threshold_bytes=threshold_bytes, cache_capacity=cache_capacity)
    hosts = [[0, 1], [2]] if cache_capacity == 50 else None
    run_ranks(SIZE, main, config=config, hosts=hosts, transport=transport)


@pytest.mark.parametrize("transport", [IN_PROCESS, TCP])
@pytest.mark.parametrize("native", ["auto", "off"])
def test_calls_that_are_waited_for_among_others(native: str, transport: str) -> None:
    """Some calls come in the same order everywhere and are waited for: they may be short ones."""
    cases = make_cases(7)

    def check(case: Case, rank: int, round_: int, handle: int) -> None:
        result = hvd.synchronize(handle)
        result = result[0] if case.collective == "alltoall" else result
        np.testing.assert_array_equal(result, case.expected(rank, round_), case.name)

    def main(rank: int) -> None:
        order = random.Random(rank)
        waited = random.Random(99).sample(cases, 70)
        others = [case for case in cases if case not in waited]
        for round_ in range(3):
            started: dict[Case, int] = {}
            rest = order.sample(others, len(others))
            for case in waited:
                if rest and order.random() < 0.3:
                    other = rest.pop()
                    started[other] = other.start(other.input(rank, round_))
                check(case, rank, round_, case.start(case.input(rank, round_)))
            for case in rest:
                started[case] = case.start(case.input(rank, round_))
            for case, handle in started.items():
                check(case, rank, round_, handle)

    run_ranks(SIZE, main, config=Config(native=native), transport=transport)


@pytest.mark.parametrize(
    ("transport", "hosts"), [(IN_PROCESS, None), (TCP, None), (TCP, [[0, 2], [1, 3]])]
)
def test_overlapping_process_sets_in_any_order_do_not_deadlock(
    transport: str, hosts: list[list[int]] | None
) -> None:
    size, members = 4, [[0, 1], [1, 2], [0, 2, 3], [1, 3], [0, 1, 2, 3]]

    def main(rank: int) -> None:
        sets = [hvd.add_process_set(ranks) for ranks in members[:-1]] + [hvd.global_process_set]
        order = random.Random(100 + rank)
        for round_ in range(20):
            mine = [(s, i) for s in sets if s.included() for i in range(5)]
            handles = []
            for process_set, index in order.sample(mine, len(mine)):
                value = np.full(index + 1, rank + round_)
                name = f"{process_set.process_set_id}.{index}"
                handle = hvd.allreduce_async(value, name=name, op=hvd.Sum, process_set=process_set)
                handles.append((handle, process_set, index))
            for handle, process_set, index in handles:
                total = sum(each + round_ for each in process_set.ranks)
                expected = np.full(index + 1, total)
                np.testing.assert_array_equal(hvd.synchronize(handle), expected)

    run_ranks(size, main, transport=transport, hosts=hosts)
