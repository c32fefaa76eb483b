"""The law of samples, counted: what a job has used when workers die and come."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.launcher.elastic_scenarios.jobs import Fault, check_order
from tests.launcher.elastic_scenarios.regression import SAMPLES, train_alone
from tests.launcher.elastic_scenarios.sites import Site

pytestmark = pytest.mark.timeout(240)

EPOCHS = 3
SIZE = 3


@pytest.mark.parametrize("commit_every", [4])
def test_every_sample_is_used_once_in_an_epoch(site: Site, commit_every: int) -> None:
    """In 3 epochs with 3 deaths, also of rank 0, and 3 newcomers: 6 resets."""
    faults: list[Fault] = [
        {"worker": 1, "place": "gradients sent", "step": 6},
        {"worker": 0, "place": "before step", "step": 23},
        {"worker": 3, "place": "gradients sent", "step": 41},
    ]
    outcome = site.run(
        "train_torch", *site.flags(SIZE), faults=faults, EPOCHS=EPOCHS, COMMIT_EVERY=commit_every,
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
        assert set(used) == set(range(SAMPLES))
        assert sum(used.values()) - SAMPLES <= SIZE - 1
    np.testing.assert_allclose(outcome.results[0]["result"], train_alone(history), rtol=1e-10)
    # What is made again after a death is what was not committed.
    made = [line["done"] for line in outcome.lines if line["number"] == 2 and "done" in line]
    assert len(made) - len(set(made)) <= len(faults) * commit_every
