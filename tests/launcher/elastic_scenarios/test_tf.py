"""Elastic jobs of TensorFlow and Keras: functions that were traced, and scripts of Horovod's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.launcher.elastic_scenarios.features_tf import STEPS, train_alone
from tests.launcher.elastic_scenarios.horovod_jobs import (
    BATCHES,
    EPOCHS,
    train_through_two_kills_and_growth,
)
from tests.launcher.elastic_scenarios.jobs import check_order
from tests.launcher.elastic_scenarios.sites import Site

pytestmark = pytest.mark.timeout(360)

FLOAT16 = 2.0**-10  # Gradients are rounded to it on their way.


def test_traced_function_with_batch_norm_compression_and_join(site: Site) -> None:
    """It was traced on two ranks, runs on one that is left, and then with a newcomer."""
    fault = {"worker": 1, "place": "before step", "step": 3}
    outcome = site.run("train_features_tf", *site.flags(2), faults=[fault], HOLD="6 2", timeout=200)
    assert outcome.code == 0, outcome.out + outcome.err
    assert list(outcome.worlds().values()) == [[0, 1], [0], [0, 2]]
    check_order(outcome)
    assert len(outcome.results) == 2
    history = outcome.results[0]["history"]
    assert history == [[0, 1]] * 3 + [[0]] * 3 + [[0, 2]] * (STEPS - 6)
    expected, way = train_alone(history)
    for line in outcome.results:
        assert (line["history"], line["traces"]) == (history, 1)
        for found, value in zip(line["result"], expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=FLOAT16 * way)


RESETS = 3


@pytest.mark.soak  # TensorFlow starts four times.
def test_the_loop_of_horovods_documentation(site: Site) -> None:
    """Its loop begins again with the batch of the last commit, which it had made."""
    for epoch, batch, steps in train_through_two_kills_and_growth("tensorflow_script", site):
        assert (epoch, batch) == (EPOCHS - 1, 0)
        assert EPOCHS * BATCHES <= steps <= EPOCHS * BATCHES + RESETS


@pytest.mark.soak
def test_fit_of_keras_makes_every_batch_once(site: Site) -> None:
    for found in train_through_two_kills_and_growth("keras_script", site):
        assert found == (EPOCHS, 0, EPOCHS * BATCHES)
