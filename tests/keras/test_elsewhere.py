"""All tests of this folder once more, where Keras has another backend, and where it is Keras 2."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

LIMIT_SECONDS = 300
CHOSEN = bool({"KERAS_BACKEND", "TF_USE_LEGACY_KERAS"} & os.environ.keys())


@pytest.mark.skipif(CHOSEN, reason="the environment was chosen already")
@pytest.mark.timeout(LIMIT_SECONDS + 20)
@pytest.mark.parametrize(
    ("environment", "needed"),
    [
        pytest.param({"KERAS_BACKEND": "torch"}, "torch", id="torch"),
        pytest.param({"TF_USE_LEGACY_KERAS": "1"}, "tf_keras", id="Keras 2"),
    ],
)
def test_elsewhere(environment: dict[str, str], needed: str) -> None:
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).parent),
        ],
        check=False,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
