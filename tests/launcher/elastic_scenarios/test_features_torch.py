"""What a PyTorch script has beside its weights goes on when ranks die and come."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.launcher.elastic_scenarios.features import EPOCHS, SAMPLES, train_alone
from tests.launcher.elastic_scenarios.jobs import Outcome, check_order
from tests.launcher.elastic_scenarios.sites import Site

pytestmark = pytest.mark.timeout(180)

SIZE, COMMIT_EVERY = 3, 3
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
    for epoch in range(EPOCHS):
        used = Counter(
            i for number, ranks, _ in history if number == epoch for b in ranks for i in b
        )
        assert set(used) == set(range(SAMPLES))
        assert sum(used.values()) - SAMPLES <= 2 * (SIZE - 1)
    weights, means, scales, way = train_alone(history)
    assert [scale for _, _, scale in history] == scales
    for line in outcome.results:
        error = (torch.tensor(line["result"], dtype=torch.float64) - weights).norm()
        assert error < FLOAT16 * way
        torch.testing.assert_close(
            torch.tensor(line["means"]), means.float(), rtol=0.01, atol=0.001
        )
    assert error > FLOAT16**2 * way  # Gradients were compressed in every world.
