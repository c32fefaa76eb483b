"""The tests of Keras once more, where it has other backends, and where it is Keras 2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.limits import patient

LIMIT_SECONDS = 400
HERE = Path(__file__).parent
ON_SERVERS = HERE.parent / "ps" / "test_keras.py"
CHOSEN = bool({"KERAS_BACKEND", "TF_USE_LEGACY_KERAS"} & os.environ.keys())
ELSEWHERE = {
    "jax": ({"KERAS_BACKEND": "jax"}, "jax"),
    "torch": ({"KERAS_BACKEND": "torch"}, "torch"),
    "Keras 2": ({"TF_USE_LEGACY_KERAS": "1"}, "tf_keras"),
}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """All runs at once that were asked for; each computes in one thread for most of its time."""
    items = request.session.items
    asked = [item.callspec.params["name"] for item in items if item.path == request.path]  # type: ignore[attr-defined]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    found: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for name, (environment, needed) in ELSEWHERE.items():
            if name not in asked or find_spec(needed) is None:
                continue
            output = stack.enter_context((tmp_path_factory.getbasetemp() / name).open("wb"))
            folders = [HERE, ON_SERVERS] if name == "jax" else [HERE]
            run = subprocess.Popen(
                [*words, *map(str, folders)], env={**os.environ, **environment},
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            stack.callback(run.wait)
            stack.callback(run.kill)
            found[name] = run
        yield found


@pytest.mark.skipif(CHOSEN, reason="the environment was chosen already")
@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.elsewhere
@pytest.mark.parametrize("name", ELSEWHERE)
def test_elsewhere(
    name: str,
    runs: dict[str, subprocess.Popen[bytes]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if name not in runs:
        pytest.skip(f"{ELSEWHERE[name][1]} is not installed")
    code = runs[name].wait(patient(LIMIT_SECONDS))
    assert code == 0, (tmp_path_factory.getbasetemp() / name).read_text()
