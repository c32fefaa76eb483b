"""Slices of batches and samplers, on ranks."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdlite import data
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime.lifecycle import add_process_set
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.data.slicing import place
from tests.ranks import run_ranks

Pair = namedtuple("Pair", ["images", "labels"])


def batch() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.arange(4 * 2 * 8 * 8.0).reshape(4, 2, 8, 8), np.arange(4)


def test_views_of_each_part() -> None:
    images, labels = batch()

    def main(rank: int) -> None:
        part, same = data.slice_batch((images, labels), ((1, 1, 1, 4), (1,)))
        np.testing.assert_array_equal(part, images[..., 2 * rank : 2 * rank + 2])
        assert np.shares_memory(part, images) and part.base is not None
        assert same is labels
        part, own = data.slice_batch([images, labels])
        np.testing.assert_array_equal(part, images[rank : rank + 1])
        np.testing.assert_array_equal(own, [rank])
        assert data.slice_batch((images, labels), "full_batch")[0] is images
        part, same = data.slice_batch((images, labels), patches=(2, 2))
        row, column = divmod(rank, 2)
        assert same is labels and np.shares_memory(part, images)
        np.testing.assert_array_equal(
            part, images[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        )

    run_ranks(4, main)


def test_the_structure_stays() -> None:
    images, labels = batch()

    def main(rank: int) -> None:
        assert isinstance(data.slice_batch(images), np.ndarray)
        assert isinstance(data.slice_batch(Pair(images, labels)), Pair)
        found = data.slice_batch({"x": images, "rest": [labels, (labels,)]})
        assert list(found) == ["x", "rest"]
        assert type(found["rest"]) is list and type(found["rest"][1]) is tuple
        np.testing.assert_array_equal(found["rest"][1][0], np.split(labels, 2)[rank])
        for wrong in (images, 3), "text":
            with pytest.raises(TypeError, match="a batch is made of arrays"):
                data.slice_batch(wrong)

    run_ranks(2, main)


def test_a_mesh_is_some_ranks_in_order() -> None:
    labels = np.arange(6)

    mesh = SimpleNamespace(mesh=np.array([[2, 0], [1, 3]]))

    def main(rank: int) -> None:
        pair = add_process_set([1, 3])
        assert place(mesh) == ({2: 0, 0: 1, 1: 2, 3: 3}[rank], 4)
        if rank in (1, 3):
            mine = data.slice_batch(labels, mesh=pair)
            np.testing.assert_array_equal(mine, np.split(labels, 2)[rank // 2])
        else:
            with pytest.raises(ValueError, match=f"rank {rank} is not part"):
                data.slice_batch(labels, mesh=pair)
        with pytest.raises(ValueError, match="not registered"):
            data.slice_batch(labels, mesh=ProcessSet([0]))
        with pytest.raises(TypeError, match="mesh is a ProcessSet, a torch DeviceMesh or None"):
            data.slice_batch(labels, mesh=4)
        with pytest.raises(ValueError, match=f"rank {rank} is not in the mesh"):
            data.slice_batch(labels, mesh=SimpleNamespace(mesh=np.array([rank + 1])))

    run_ranks(4, main)


def test_a_sliced_loader_can_be_read_again() -> None:
    def main(rank: int) -> None:
        loader = data.Sliced([batch()] * 3, ((1, 1, 2, 1), (1,)))
        assert len(loader) == 3
        for _ in range(2):
            parts = list(loader)
            assert [images.shape for images, _ in parts] == [(4, 2, 4, 8)] * 3
            np.testing.assert_array_equal(parts[0][0], np.split(batch()[0], 2, axis=2)[rank])

    run_ranks(2, main)


def test_full_batch_is_a_strategy_and_no_flag() -> None:
    """MindSpore's flag is deprecated."""
    refused: list[Any] = [data.slice_batch, data.Sliced, data.sampler_for]
    for call in refused:
        with pytest.raises(TypeError, match="full_batch"):
            call(range(4), full_batch=True)


def test_wrong_arguments_are_refused_before_a_batch_comes() -> None:
    with pytest.raises(ValueError, match="data_paralel"):
        data.Sliced([], "data_paralel")
    with pytest.raises(ValueError, match=r"hvd\.init"):
        data.slice_batch(np.arange(4))


@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_of_ones_own_cover_the_data(shuffle: bool) -> None:
    def main(rank: int) -> tuple[list[int], list[int]]:
        sampler = data.sampler_for("data_parallel", range(10), shuffle=shuffle, seed=3)
        first = list(sampler)
        sampler.set_epoch(1)
        assert len(sampler) == len(first) == 4
        return first, list(sampler)

    first, second = zip(*run_ranks(3, main), strict=True)
    for epoch in first, second:
        samples = [sample for each in zip(*epoch, strict=True) for sample in each]
        assert sorted(samples[:10]) == list(range(10)) and samples[10:] == samples[:2]
    assert (first != second) is shuffle


@pytest.mark.parametrize("strategy", ["full_batch", ((1, 1, 1, 2), (1,))], ids=str)
def test_samples_are_the_same_where_batches_are_cut(strategy: Any) -> None:
    def main(rank: int) -> list[int]:
        sampler = data.sampler_for(strategy, range(10), seed=7)
        assert len(sampler) == 10
        return list(sampler)

    first, second = run_ranks(2, main)
    assert first == second != sorted(first) == list(range(10))


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("seed", (1, 1, 2), "seed: rank 0 has 1, rank 2 has 2"),
        ("samples", (9, 8, 9), "samples: rank 0 has 9, rank 1 has 8"),
        ("strategy", ("full_batch",) * 2 + ("data_parallel",),
         "strategy: rank 0 has 'full_batch', rank 2 has 'data_parallel'"),
        ("shuffle", (True, False, True), "shuffle: rank 0 has True, rank 1 has False"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_named(name: str, values: Any, words: str) -> None:
    def main(rank: int) -> None:
        given = {"strategy": "full_batch", "seed": 1, "samples": 9, "shuffle": True}
        given[name] = values[rank]
        with pytest.raises(HorovodInternalError) as raised:
            data.sampler_for(
                given["strategy"],  # type: ignore[arg-type]
                range(given["samples"]),  # type: ignore[call-overload]
                shuffle=given["shuffle"],  # type: ignore[arg-type]
                seed=given["seed"],  # type: ignore[arg-type]
            )
        assert words in str(raised.value)

    run_ranks(3, main)


def test_the_ranks_of_a_mesh_agree_among_themselves() -> None:
    """Rank 4 is in no mesh and calls nothing; the two meshes have other data and seeds."""
    meshes = [SimpleNamespace(mesh=np.array(ranks)) for ranks in ([2, 0], [1, 3])]

    def main(rank: int) -> list[int]:
        if rank == 4:
            return []
        which = rank % 2
        mesh, samples = meshes[which], range(6 + 2 * which)
        order = list(data.sampler_for("data_parallel", samples, seed=which, mesh=mesh))
        with pytest.raises(HorovodInternalError) as raised:
            data.sampler_for("full_batch", samples, seed=rank, mesh=mesh)
        first = which  # The ranks of the errors are those of the job.
        words = f"seed: rank {first} has {first}, rank {first + 2} has {first + 2}"
        assert words in str(raised.value)
        return order

    found = run_ranks(5, main)
    assert sorted(found[0] + found[2]) == list(range(6))
    assert sorted(found[1] + found[3]) == list(range(8))


def test_a_wrong_mesh_is_refused_before_anything_is_sent() -> None:
    """The other rank goes on alone: it hangs where a rank has sent a part of the exchange."""

    def main(rank: int) -> None:
        if rank == 0:
            for mesh, error in ((4, TypeError), (SimpleNamespace(mesh=np.array([1])), ValueError)):
                with pytest.raises(error, match="mesh"):
                    data.sampler_for("full_batch", range(3), mesh=mesh)
        data.sampler_for("full_batch", range(3))

    run_ranks(2, main)


@pytest.mark.parametrize("seed", [-1, 1.5, True, None])
def test_a_seed_is_a_natural_number(seed: Any) -> None:
    with pytest.raises(ValueError, match=f"seed={seed}"):
        data.sampler_for("full_batch", range(3), seed=seed)
