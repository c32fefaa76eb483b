"""The scenarios that train with PyTorch, on three hosts."""

from __future__ import annotations

import pytest

from tests.launcher.elastic_scenarios.test_horovod_torch import (
    test_the_loop_of_horovods_documentation,
)
from tests.launcher.elastic_scenarios.test_samples_torch import (
    test_every_sample_is_used_once_in_an_epoch,
)

pytestmark = pytest.mark.timeout(120)

__all__ = ["test_every_sample_is_used_once_in_an_epoch", "test_the_loop_of_horovods_documentation"]
