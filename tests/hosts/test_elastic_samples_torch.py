"""The law of samples on three hosts."""

from __future__ import annotations

import pytest

from tests.launcher.elastic_scenarios.test_torch import (  # noqa: F401 - pytest collects it here
    test_every_sample_is_used_once_in_an_epoch,
)

pytestmark = [pytest.mark.timeout(240), pytest.mark.soak]  # PyTorch starts six times.
