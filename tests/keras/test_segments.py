"""Keras optimizers whose gradients are reduced in segments, in all environments of Keras."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import hvdlite.keras as hvd
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from tests.keras.training import (
    Weights,
    adam,
    assert_close,
    assert_same,
    fit_alone,
    fit_together,
    make_model,
    sgd,
    train,
    wrapped,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)
SIZE = 2
STEPS = 4


@pytest.mark.parametrize(
    ("options", "segments"),
    [
        ({"segmentation": "size:50,50"}, 2),
        ({"fuse_all_reduce_ops": False}, 4),
    ],
    ids=str,
)
def test_steps_reduce_as_many_times_as_there_are_segments(
    options: dict[str, Any], segments: int
) -> None:
    def main(rank: int) -> Weights:
        optimizer = wrapped(adam, **options)()
        runs: list[str] = []
        current().engine.observe(lambda run: runs.append(run.names[0]))
        weights = train(make_model(), optimizer, rank, SIZE)
        gradients = [name for name in runs if "trainable_parameters" not in name]
        assert len(gradients) == STEPS * segments
        return weights

    everywhere = run_ranks(SIZE, main)
    assert_same(everywhere)
    assert_close(everywhere[0], train(make_model(), adam()))


def test_fit_in_segments_is_fit() -> None:
    assert_close(fit_together(SIZE, wrapped(sgd, segmentation="mb:-1")), fit_alone(sgd))


def test_a_setting_holds_without_a_word() -> None:
    def main(rank: int) -> None:
        runs: list[str] = []
        current().engine.observe(lambda run: runs.append(run.names[0]))
        train(make_model(), wrapped(adam)(), rank, SIZE)
        assert len([name for name in runs if "trainable_parameters" not in name]) == STEPS * 2

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(SIZE, main, config=Config(segmentation="size:50,50"))
    assert not [each for each in caught if "segmentation" in str(each.message)]


def test_a_partial_optimizer_takes_a_segmentation_too() -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match="sum to 10"):
            hvd.PartialDistributedOptimizer(adam(), segmentation="size:10")

    run_ranks(1, main)


@pytest.mark.parametrize("unknown", ["lr_typo", "local_layers"])  # which the partial one has
def test_unknown_arguments_are_named(unknown: str) -> None:
    options: dict[str, Any] = {unknown: 1}

    def main(rank: int) -> None:
        with pytest.raises(TypeError, match=f"there is no argument {unknown}; .*fuse_grad_count"):
            hvd.DistributedOptimizer(adam(), **options)

    run_ranks(1, main)
