"""A script of Horovod's for TensorFlow 2, unmodified: through two deaths and one newcomer."""

from __future__ import annotations

import pytest

from tests.launcher.elastic_scenarios.horovod_jobs import (
    BATCHES,
    EPOCHS,
    train_through_two_kills_and_growth,
)
from tests.launcher.elastic_scenarios.sites import Site

RESETS = 3

pytestmark = [pytest.mark.timeout(360), pytest.mark.soak]  # TensorFlow starts four times.


def test_the_loop_of_horovods_documentation(site: Site) -> None:
    """Its loop begins again with the batch of the last commit, which it had made."""
    for epoch, batch, steps in train_through_two_kills_and_growth("tensorflow_script", site):
        assert (epoch, batch) == (EPOCHS - 1, 0)
        assert EPOCHS * BATCHES <= steps <= EPOCHS * BATCHES + RESETS


def test_fit_of_keras_makes_every_batch_once(site: Site) -> None:
    for found in train_through_two_kills_and_growth("keras_script", site):
        assert found == (EPOCHS, 0, EPOCHS * BATCHES)
