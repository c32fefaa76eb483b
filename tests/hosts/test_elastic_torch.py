"""A script of Horovod's for PyTorch on three hosts."""

from __future__ import annotations

import pytest

from tests.launcher.elastic_scenarios.test_torch import (  # noqa: F401 - pytest collects it here
    test_the_loop_of_horovods_documentation,
)

pytestmark = [pytest.mark.timeout(240), pytest.mark.soak]  # PyTorch starts four times.
