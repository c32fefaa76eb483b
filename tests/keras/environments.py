"""Runs a file of tests once more, where Keras has another backend, and where it is Keras 2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest

ENVIRONMENTS = [
    pytest.param({"KERAS_BACKEND": "torch"}, "torch", id="torch"),
    pytest.param({"TF_USE_LEGACY_KERAS": "1"}, "tf_keras", id="Keras 2"),
]
CHOSEN = bool({"KERAS_BACKEND", "TF_USE_LEGACY_KERAS"} & os.environ.keys())


def elsewhere(path: str) -> Callable[[dict[str, str], str], None]:
    """A test that all tests of this file pass in the other environments, too."""

    @pytest.mark.skipif(CHOSEN, reason="the environment was chosen already")
    @pytest.mark.parametrize("environment, needed", ENVIRONMENTS)
    def test(environment: dict[str, str], needed: str) -> None:
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
            check=False,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return test
