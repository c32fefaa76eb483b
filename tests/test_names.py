"""Second names give the very same modules, and no framework is imported that nobody has named."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import hvdlite
from hvdlite.names import OWN_NAMES, own_name
from tests.parallel.jobs import environment

PACKAGE = Path(hvdlite.__file__).parent


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_name_holds_for_all_below_it() -> None:
    assert own_name("hvdlite.tensorflow") == "hvdlite.tf"
    assert own_name("hvdlite.tensorflow.mpi_ops") == "hvdlite.tf.mpi_ops"
    assert own_name("hvdlite.tf.keras.callbacks") == "hvdlite.keras.callbacks"
    assert own_name("hvdlite.tensorflow.keras") == "hvdlite.keras"
    for name in ("hvdlite", "hvdlite.torch", "hvdlite.tf", "hvdlite.tensorflows", "tensorflow"):
        assert own_name(name) == name


def test_second_names_give_the_same_modules() -> None:
    pytest.importorskip("tensorflow", reason="the extra 'tensorflow' is not installed")
    run(
        "import hvdlite.tensorflow.mpi_ops, hvdlite.tf, hvdlite.tensorflow.keras.framework\n"
        "import hvdlite.keras, hvdlite.tf.keras\n"
        "from hvdlite.tensorflow import compression, mpi_ops\n"
        "assert hvdlite.tensorflow is hvdlite.tf\n"
        "assert mpi_ops is hvdlite.tensorflow.mpi_ops is hvdlite.tf.mpi_ops\n"
        "assert compression is hvdlite.tf.compression\n"
        "assert hvdlite.tensorflow.keras is hvdlite.keras is hvdlite.tf.keras\n"
        "assert hvdlite.tensorflow.keras.framework is hvdlite.keras.framework\n"
        "assert hvdlite.tf.__spec__.name == hvdlite.tf.__name__ == 'hvdlite.tf'\n"
        "import importlib; importlib.reload(compression)\n"
    )


def test_what_is_not_there_is_missing_under_the_name_that_was_asked_for() -> None:
    pytest.importorskip("tensorflow", reason="the extra 'tensorflow' is not installed")
    with pytest.raises(ModuleNotFoundError, match=r"hvdlite\.tensorflow\.nowhere"):
        __import__("hvdlite.tensorflow.nowhere")
    assert find_spec("hvdlite.tensorflow.nowhere") is None


def test_a_missing_framework_is_named() -> None:
    code = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "import hvdlite\n"
        "for name in ('hvdlite.tf', 'hvdlite.tensorflow', 'hvdlite.tensorflow.mpi_ops'):\n"
        "    try: __import__(name)\n"
        "    except ModuleNotFoundError as error: print(error.name)\n"
    )
    assert run(code).split() == ["tensorflow"] * 3


@pytest.mark.parametrize("own", ["numpy", "torch", "tf", "tensorflow"])
def test_no_other_framework_is_imported(own: str) -> None:
    framework = {"tf": "tensorflow"}.get(own, own)
    pytest.importorskip(framework, reason=f"the extra {framework!r} is not installed")
    code = (
        f"import sys; import hvdlite.{own} as hvd; hvd.init(); hvd.shutdown()\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    frameworks = {"torch", "tensorflow", "keras", "tf_keras", "jax"}
    found = frameworks & set(run(code).split())
    if framework == "tensorflow":
        found -= {"keras", "tf_keras"}  # parts of TensorFlow
    assert found <= {framework}


def test_editors_find_the_second_names() -> None:
    for second in (*OWN_NAMES, "hvdlite.tensorflow.keras"):
        stub = PACKAGE.joinpath(*second.split(".")[1:], "__init__.pyi")
        assert f"from {own_name(second)} import *\n" in stub.read_text()
