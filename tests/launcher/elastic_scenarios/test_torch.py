"""What elastic jobs of PyTorch keep when workers die and come: all that trains, and samples."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.launcher.elastic_scenarios import features, horovod_jobs, regression
from tests.launcher.elastic_scenarios.jobs import Fault, Outcome, check_order
from tests.launcher.elastic_scenarios.sites import Site

pytestmark = pytest.mark.timeout(240)

SIZE, COMMIT_EVERY = 3, 3
EPOCHS = 3  # Of the law of samples.
RESETS = 3  # Of the script of Horovod.
FLOAT16 = 2.0**-10  # Gradients are rounded to it on their way.


def check_loaders(outcome: Outcome) -> None:
    """Each worker has one process that loads, never more, and it holds no connection."""
    looks = [line for line in outcome.lines if "loader" in line]
    assert {line["sockets"] for line in looks} == {0}
    forks = Counter(line["number"] for line in looks)
    assert forks[1] == 1 and forks[3] == 1  # Their processes persist across resets.
    assert forks[0] >= 4  # One for each iteration: in three worlds, and two epochs.
    assert {
        line["children"] for line in outcome.lines if "step" in line and "children" in line
    } == {1}
    for line in outcome.lines:
        if "entered" in line:
            has_loaded = any(
                each["number"] == line["number"] and each["time"] < line["time"] for each in looks
            )
            assert line["children"] == (line["number"] % 2 == 1 and has_loaded)
    assert [line["children"] for line in outcome.results] == [0, 0]


def test_scaler_batch_norm_compression_sparse_loaders_and_join(site: Site) -> None:
    """Rank 2 dies amid a step, a newcomer comes, and rank 0 dies while the others join.

    When rank 2 dies, the others wait for its part of a sparse tensor, which they sum in each step.
    """
    faults = [
        {"worker": 2, "place": "gradients sent", "step": 5},
        {"worker": 0, "place": "before join", "step": 12},
    ]
    outcome = site.run(
        "train_features",
        *site.flags(SIZE),
        faults=faults,
        HOLD=f"8 {SIZE}",
        COMMIT_EVERY=COMMIT_EVERY,
    )
    assert outcome.code == 0, outcome.out + outcome.err
    assert [(line["worker"], line["fault"]) for line in outcome.faults] == [
        (fault["worker"], fault["place"]) for fault in faults
    ]
    assert list(outcome.worlds().values()) == [[0, 1, 2], [0, 1], [0, 1, 3], [1, 3]]
    check_order(outcome)
    check_loaders(outcome)
    steps = [line for line in outcome.lines if "imported" in line and line["number"] == 3]
    assert steps[0]["imported"] == []  # The others do not wait for imports of a newcomer.
    first, second = outcome.results
    assert (first["history"], first["result"]) == (second["history"], second["result"])
    history = first["history"]
    for epoch in range(features.EPOCHS):
        used = Counter(
            i for number, ranks, _ in history if number == epoch for b in ranks for i in b
        )
        assert set(used) == set(range(features.SAMPLES))
        assert sum(used.values()) - features.SAMPLES <= 2 * (SIZE - 1)
    weights, means, scales, way = features.train_alone(history)
    assert [scale for _, _, scale in history] == scales
    for line in outcome.results:
        error = (torch.tensor(line["result"], dtype=torch.float64) - weights).norm()
        assert error < FLOAT16 * way
        torch.testing.assert_close(
            torch.tensor(line["means"]), means.float(), rtol=0.01, atol=0.001
        )
    assert error > FLOAT16**2 * way  # Gradients were compressed in every world.


def test_every_sample_is_used_once_in_an_epoch(site: Site) -> None:
    """In 3 epochs with 3 deaths, also of rank 0, and 3 newcomers: 6 resets."""
    faults: list[Fault] = [
        {"worker": 1, "place": "gradients sent", "step": 6},
        {"worker": 0, "place": "before step", "step": 23},
        {"worker": 3, "place": "gradients sent", "step": 41},
    ]
    outcome = site.run(
        "train_torch", *site.flags(SIZE), faults=faults, EPOCHS=EPOCHS, COMMIT_EVERY=4,
        HOLD=f"10 28 46 {SIZE}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.out + outcome.err
    assert [line["worker"] for line in outcome.faults] == [1, 0, 3]
    assert [len(members) for members in outcome.worlds().values()] == [3, 2, 3, 2, 3, 2, 3]
    check_order(outcome)
    assert len(outcome.results) == SIZE
    history = outcome.results[0]["history"]
    for line in outcome.results:
        assert (line["history"], line["result"]) == (history, outcome.results[0]["result"])
        assert line["epoch"] == EPOCHS
    for epoch in range(EPOCHS):
        batches = [batch for number, ranks in history if number == epoch for batch in ranks]
        used = Counter(index for batch in batches for index in batch)
        assert set(used) == set(range(regression.SAMPLES))
        assert sum(used.values()) - regression.SAMPLES <= SIZE - 1
    np.testing.assert_allclose(
        outcome.results[0]["result"], regression.train_alone(history), rtol=1e-10
    )
    # What is made again after a death is what was not committed.
    made = [line["done"] for line in outcome.lines if line["number"] == 2 and "done" in line]
    assert len(made) - len(set(made)) <= len(faults) * 4


def test_the_loop_of_horovods_documentation(site: Site) -> None:
    """Its loop begins again with the batch of the last commit, which it had made."""
    for epoch, batch, steps in horovod_jobs.train_through_two_kills_and_growth(
        "torch_script", site
    ):
        assert (epoch, batch) == (horovod_jobs.EPOCHS - 1, 0)
        least = horovod_jobs.EPOCHS * horovod_jobs.BATCHES
        assert least <= steps <= least + RESETS
