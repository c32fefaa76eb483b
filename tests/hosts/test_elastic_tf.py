"""The scenarios that train with TensorFlow and Keras, on three hosts."""

from __future__ import annotations

import pytest

from tests.launcher.elastic_scenarios.test_tf import (  # noqa: F401 - pytest collects it here
    test_fit_of_keras_makes_every_batch_once,
    test_the_loop_of_horovods_documentation,
)

pytestmark = [pytest.mark.timeout(360), pytest.mark.soak]
