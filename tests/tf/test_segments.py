"""Gradients of TensorFlow that are reduced in segments: how many reductions, and of what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.runtime.current import current
from hvdlite.common.segmentation.saved_results import save
from hvdlite.common.segmentation.strategies import Gradient
from hvdlite.common.settings.config import Config
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)
SIZE = 2
NAMES = ("a/kernel", "a/bias", "b/kernel", "b/bias", "c/kernel", "c/bias")
SHAPES = ((4, 2), (2,), (4, 2), (2,), (4, 2), (2,))


def variables() -> list[tf.Variable]:
    return [
        tf.Variable(tf.ones(shape), name=name) for name, shape in zip(NAMES, SHAPES, strict=True)
    ]


def gradients_of(mode: str, rank: int, sources: list[tf.Variable], **options: Any) -> Any:
    """Of a sum in which the variable of number n counts (n + 1) * (rank + 1) times."""

    def compute() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [tf.reduce_sum(each) * (n + 1.0) * (rank + 1) for n, each in enumerate(sources)]
            )
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, sources)

    return tf.function(compute) if mode == "graph" else compute


@pytest.mark.filterwarnings("ignore:segmentation auto learns from the hooks of PyTorch:UserWarning")
@pytest.mark.parametrize(
    ("mode", "options", "counts"),
    [
        ("eager", {"segmentation": "size:50,50"}, [3, 3]),
        ("graph", {"segmentation": "size:50,50"}, [3, 3]),
        ("eager", {"segmentation": "index:0,2,5"}, [1, 2, 3]),
        ("eager", {"fuse_grad_count": 2}, [4, 2]),
        ("graph", {"segmentation": "mb:-1"}, [2, 2, 2]),
        ("eager", {"fuse_all_reduce_ops": False}, [1] * 6),
        ("eager", {"segmentation": "auto"}, [6]),
    ],
    ids=str,
)
def test_a_tape_reduces_as_many_times_as_there_are_segments(
    mode: str, options: dict[str, Any], counts: list[int]
) -> None:
    def main(rank: int) -> None:
        sources = variables()
        compute = gradients_of(mode, rank, sources, **options)
        runs: list[int] = []
        current().engine.observe(lambda run: runs.append(len(run.names)))
        for _ in range(2):
            runs.clear()
            for number, gradient in enumerate(compute()):
                np.testing.assert_allclose(gradient, np.full(SHAPES[number], 1.5 * (number + 1)))
            assert sorted(runs) == sorted(counts)

    run_ranks(SIZE, main)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_was_set_for_the_job_holds_for_tapes(mode: str) -> None:
    def main(rank: int) -> None:
        runs: list[int] = []
        current().engine.observe(lambda run: runs.append(len(run.names)))
        gradients_of(mode, rank, variables())()
        assert sorted(runs) == [3, 3]

    run_ranks(SIZE, main, config=Config(segmentation="index:2,5"))


def test_another_segmentation_on_one_rank_is_an_error_that_names_both() -> None:
    def main(rank: int) -> None:
        with pytest.raises(Exception, match=r"size:50,50.*segmentation=count:5"):
            gradients_of(
                "eager", rank, variables(), segmentation="count:5" if rank else "size:50,50"
            )()

    run_ranks(SIZE, main)


def test_slices_travel_apart() -> None:
    def main(rank: int) -> None:
        table = tf.Variable(tf.ones((5, 2)), name="table")
        weight = tf.Variable(tf.ones(2), name="weight")
        runs: list[str] = []
        current().engine.observe(lambda run: runs.append(run.collective))
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, [rank])
            loss = tf.reduce_sum(rows * weight)
        tape = hvd.DistributedGradientTape(tape, segmentation="size:100")
        slices, dense = tape.gradient(loss, [table, weight])
        assert sorted(runs) in (["allgather", "allgather", "allreduce"], ["allgather", "allreduce"])
        assert isinstance(slices, tf.IndexedSlices)
        np.testing.assert_allclose(dense, [1, 1])

    run_ranks(SIZE, main)


def test_auto_says_that_it_cannot_learn_here_and_takes_what_a_file_has(tmp_path: Path) -> None:
    file = tmp_path / "learned.json"
    sources = variables()
    described = [
        Gradient(f"DistributedGradientTape.{n}.{name}", 4 * int(np.prod(shape)), "float32", name)
        for n, (name, shape) in enumerate(zip(NAMES, SHAPES, strict=True))
    ]
    save(str(file), [1, 5], described[::-1])

    def main(rank: int) -> list[int]:
        runs: list[int] = []
        current().engine.observe(lambda run: runs.append(len(run.names)))
        gradients_of("eager", rank, sources, segmentation=f"auto:{file}")()
        return runs

    assert [sorted(runs) for runs in run_ranks(SIZE, main)] == [[2, 4]] * SIZE
    with pytest.warns(UserWarning, match="auto learns from the hooks of PyTorch"):
        run_ranks(SIZE, lambda rank: gradients_of("eager", rank, sources, segmentation="auto")())
