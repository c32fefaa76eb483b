"""`ElasticSampler`: the vectors of its partitions, and the law of samples."""

from __future__ import annotations

from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd
from hvdlite.torch.elastic import sampler as sampler_module
from hvdlite.torch.elastic.sampler import ElasticSampler
from tests.ranks import run_ranks

Partitions = list[list[int]]


def sampler_of(rank: int, size: int, n: int, **options: Any) -> ElasticSampler:
    with (
        mock.patch.object(sampler_module, "rank", lambda: rank),
        mock.patch.object(sampler_module, "size", lambda: size),
    ):
        return ElasticSampler(range(n), **options)


def partitions(size: int, n: int, epoch: int = 0, processed: int = 0, **options: Any) -> Partitions:
    """What the sampler of each rank yields."""
    found = []
    for rank in range(size):
        sampler = sampler_of(rank, size, n, **options)
        with (
            mock.patch.object(sampler_module, "rank", lambda: rank),  # noqa: B023
            mock.patch.object(sampler_module, "size", lambda: size),
        ):
            sampler.load_state_dict({"epoch": epoch, "processed_num": processed})
        found.append(list(sampler))
        assert len(sampler) == len(found[-1]) == sampler.num_samples
        assert sampler.total_size == sampler.num_samples * size
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"size": 4, "n": 10}, [[7, 3, 9], [8, 4, 6], [1, 2, 7], [5, 0, 8]]),
        ({"size": 3, "n": 10, "processed": 4}, [[3, 0], [4, 9], [2, 6]]),
        ({"size": 2, "n": 10, "processed": 4}, [[3, 2, 9], [4, 0, 6]]),
        ({"size": 3, "n": 10, "epoch": 1}, [[6, 7, 0, 2], [8, 5, 4, 6], [9, 3, 1, 8]]),
        ({"size": 4, "n": 10, "shuffle": False}, [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]),
        ({"size": 3, "n": 10, "processed": 4, "shuffle": False}, [[4, 7], [5, 8], [6, 9]]),
        ({"size": 4, "n": 10, "processed": 8, "shuffle": False}, [[8], [9], [8], [9]]),
        ({"size": 4, "n": 10, "processed": 12, "shuffle": False}, [[], [], [], []]),
        ({"size": 4, "n": 10, "processed": 9, "shuffle": False}, [[9], [9], [9], [9]]),
        ({"size": 2, "n": 16, "processed": 8}, [[13, 8, 0, 15], [7, 4, 6, 12]]),
        ({"size": 1, "n": 10, "seed": 42}, [[7, 3, 2, 8, 5, 6, 9, 4, 0, 1]]),
    ],
)
def test_partitions(arguments: dict[str, Any], expected: Partitions) -> None:
    assert partitions(**arguments) == expected


def test_the_fields_are_those_of_horovod() -> None:
    sampler = sampler_of(1, 4, 10, seed=3)
    assert (sampler.seed, sampler.shuffle, sampler.epoch, sampler.processed_num) == (3, True, 0, 0)
    assert (sampler.rank, sampler.num_replicas) == (1, 4)
    assert (sampler.num_samples, sampler.total_size) == (3, 12)
    assert len(sampler.dataset) == len(sampler.remaining_indices) == 10


def test_a_loader_in_one_process() -> None:
    """n=12, batches of 3: counts, repetition, commit, restore and sync."""

    def main(rank: int) -> None:
        data = TensorDataset(torch.arange(12))
        sampler = ElasticSampler(data, shuffle=False)
        state = hvd.elastic.TorchState(sampler=sampler)
        loader = DataLoader(data, 3, sampler=sampler)
        for before in (0, 12):  # Without set_epoch the epoch is repeated, and counted on.
            seen, counts = [], []
            for index, (batch,) in enumerate(loader):
                seen += batch.tolist()
                sampler.record_batch(index, 3)
                counts.append(sampler.processed_num)
            assert counts == [before + count for count in (3, 6, 9, 12)]
            assert (seen, len(sampler)) == ([*range(12)], 12)
        sampler.set_epoch(1)
        for index in range(2):
            sampler.record_batch(index, 3)
        state.commit()
        for index in range(2):
            sampler.record_batch(index, 3)
        state.restore()
        assert sampler.processed_num == 6 and list(sampler) == list(range(6, 12))
        sampler.record_batch(0, 3)
        state.commit()
        state.sync()
        assert (sampler.processed_num, len(sampler)) == (9, 3)
        sampler.set_epoch(2)
        assert (sampler.epoch, len(sampler)) == (2, 12)

    run_ranks(1, main)


def test_the_last_batch_counts_with_its_real_size() -> None:
    """10 samples on 2 ranks are 5 for each, in batches of 3: the last one has 2."""

    def main(rank: int) -> None:
        data = TensorDataset(torch.arange(10))
        sampler = ElasticSampler(data)
        counts = []
        for index, _ in enumerate(DataLoader(data, 3, sampler=sampler)):
            sampler.record_batch(index, 3)
            counts.append(sampler.processed_num)
        assert counts == [6, 10]

    run_ranks(2, main)


@pytest.mark.parametrize("n", [1, 7, 64, 101])
@pytest.mark.parametrize("sizes", [[4, 3, 5], [2, 1, 2], [3, 8, 1, 2]])
def test_every_index_is_used_once_whatever_the_sizes(n: int, sizes: list[int]) -> None:
    """One part of the epoch in each world: what is not padding is used exactly once."""
    used: list[int] = []
    processed, batch = 0, 2
    for number, size in enumerate(sizes):
        samplers = partitions(size, n, processed=processed)
        fresh = sampler_of(0, size, n)
        order = fresh.remaining_indices[processed:]
        is_last = number == len(sizes) - 1
        steps = len(samplers[0]) if is_last else min(2 * batch, len(samplers[0]))
        done = [index for step in range(steps) for index in (part[step] for part in samplers)]
        # Padding is a repetition of the first indices, at the end of the partition.
        padding = max(len(done) - len(order), 0)
        assert padding < size
        used += list(islice(done, len(done) - padding))
        processed += steps * size
    assert sorted(used) == list(range(n))
