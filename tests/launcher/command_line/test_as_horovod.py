"""hvdlite answers to the name horovod: same module objects, in child processes too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.jobs import launch
from tests.launcher.test_run import TELL
from tests.limits import HANG_SECONDS
from tests.parallel.jobs import environment

SCRIPT = """
import sys
import horovod, horovod.common, horovod.common.exceptions
from horovod.common.process_sets import ProcessSet
import hvdlite, hvdlite.common, hvdlite.common.base.errors
import horovod.numpy as hvd
import hvdlite.numpy
assert horovod.common is hvdlite.common and hvd is hvdlite.numpy is horovod.numpy
assert horovod.common.exceptions is hvdlite.common.base.errors
assert hvdlite.common.base.errors.__spec__.name == hvdlite.common.base.errors.__name__
assert horovod.run is hvdlite.run
assert not {"torch", "tensorflow", "keras"} & set(sys.modules)
print("answered", __name__, sys.argv[1:])
"""
CHILDREN = """
import multiprocessing, subprocess, sys
def child():
    import horovod.common, hvdlite.common
    assert horovod.common is hvdlite.common
    print("child answered", flush=True)
if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
    subprocess.run([sys.executable, "-c", "import horovod.common; print('child answered')"])
"""


AS_HOROVOD = ("-m", "hvdlite.as_horovod")


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=environment(**variables), capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip


def run(*words: str, **variables: str) -> str:
    done = python(*AS_HOROVOD, *words, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_as_a_script(script: Path) -> None:
    assert run(str(script), "--lr", "1") == "answered __main__ ['--lr', '1']\n"


def test_as_a_module_and_as_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import horovod.common, sys; print(horovod.common.__name__, __name__, sys.argv[1:])"
    (tmp_path / "train.py").write_text(code)
    said = "hvdlite.common __main__ ['-m', 'x']\n"
    assert run("-m", "train", "-m", "x") == run("-c", code, "-m", "x") == said


def test_flags_of_python_are_kept(script: Path) -> None:
    code = "import sys, horovod; print(sys.flags.dev_mode, sys.warnoptions)"
    done = python("-X", "dev", "-W", "error::ImportWarning", *AS_HOROVOD, "-c", code)
    assert done.stdout.startswith("True ")
    assert "error::ImportWarning" in done.stdout


def test_child_processes_answer_too(tmp_path: Path) -> None:
    path = tmp_path / "children.py"
    path.write_text(CHILDREN)
    assert run(str(path)) == "child answered\n" * 4


def test_torch_is_the_same_module() -> None:
    pytest.importorskip("torch")
    code = (
        "import tests.lean, sys\n"
        "import horovod.torch\n"
        "import hvdlite.torch, horovod.torch as hvd\n"
        "assert horovod.torch is hvd\n"
        "from horovod.torch.mpi_ops import allreduce, rank\n"
        "from horovod.torch.compression import Compression\n"
        "assert hvd is hvdlite.torch and allreduce is hvd.allreduce\n"
        "assert Compression is hvd.Compression\n"
        "assert 'tensorflow' not in sys.modules\n"
        "hvd.init(); print(hvd.size())\n"
    )
    assert run("-c", code) == "1\n"


def test_tensorflow_and_keras_are_the_same_modules() -> None:
    pytest.importorskip("tensorflow")
    code = (
        "import tests.lean, sys\n"
        "import horovod.tensorflow as hvd, horovod.keras, horovod.tensorflow.keras\n"
        "import hvdlite.keras, hvdlite.tf\n"
        "from horovod.tensorflow.mpi_ops import allreduce, rank\n"
        "from horovod.tensorflow.compression import Compression\n"
        "from horovod.tensorflow.functions import broadcast_variables\n"
        "from horovod.keras import callbacks\n"
        "from horovod.tensorflow.keras.callbacks import MetricAverageCallback\n"
        "assert hvd is hvdlite.tf and allreduce is hvd.allreduce\n"
        "assert Compression is hvd.Compression\n"
        "assert broadcast_variables is hvd.broadcast_variables\n"
        "assert horovod.keras is hvdlite.keras is horovod.tensorflow.keras\n"
        "assert callbacks is hvdlite.keras.callbacks is horovod.tensorflow.keras.callbacks\n"
        "assert MetricAverageCallback is callbacks.MetricAverageCallback\n"
        "assert 'torch' not in sys.modules\n"
        "hvd.init(); print(hvd.size())\n"
    )
    assert run("-c", code) == "1\n"


def test_modules_without_a_framework() -> None:
    code = (
        "import horovod.data, horovod.common.util, hvdlite.data, hvdlite.common.util, sys\n"
        "from horovod.data import AsyncDataLoaderMixin, BaseDataLoader\n"
        "from horovod.common.util import check_extension, env, split_list\n"
        "assert horovod.data is hvdlite.data and horovod.common.util is hvdlite.common.util\n"
        "assert not {'torch', 'tensorflow', 'keras'} & set(sys.modules)\n"
        "print(split_list([1, 2, 3], 2))\n"
    )
    assert run("-c", code) == "[[1, 2], [3]]\n"


def test_what_hvdlite_lacks_is_an_import_error() -> None:
    code = (
        "import horovod\n"
        "for name in ('horovod.mxnet', 'horovod.common.nonsense', 'horovod.nonsense.deep'):\n"
        "    try: __import__(name)\n"
        "    except ModuleNotFoundError as error: print(error.name)\n"
    )
    assert run("-c", code).split() == [
        "horovod.mxnet",
        "horovod.common.nonsense",
        "horovod.nonsense",
    ]


def test_find_spec_finds_nothing_where_there_is_nothing() -> None:
    code = (
        "import importlib.util, horovod\n"
        "for name in ('horovod.mxnet', 'horovod.oneccl', 'horovod.runner.x', 'horovod.common.x'):\n"
        "    print(importlib.util.find_spec(name))\n"
        "print(importlib.util.find_spec('horovod.numpy').name)\n"
        "import horovod.mxnet\n"
    )
    done = python(*AS_HOROVOD, "-c", code)
    assert done.stdout.split() == ["None"] * 4 + ["horovod.numpy"]
    assert "ModuleNotFoundError: No module named 'horovod.mxnet': hvdlite, which" in done.stderr


def test_the_version_is_that_of_horovod() -> None:
    code = (
        "import horovod, hvdlite, importlib.metadata as metadata\n"
        "import hvdlite.as_horovod\n"
        "print(horovod.__version__, metadata.version('horovod'))\n"
        "print(metadata.distribution('horovod').metadata['Name'], hvdlite.as_horovod.active())\n"
        "print(hvdlite.__version__ != horovod.__version__)\n"
    )
    assert run("-c", code).split("\n") == ["0.28.1 0.28.1", "horovod True", "True", ""]


def test_an_installed_horovod_does_not_come_first(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise SystemExit('the other one')")
    code = "import horovod.common, hvdlite.common; print(horovod.common is hvdlite.common)"
    assert run("-c", code, PYTHONPATH=str(tmp_path)) == "True\n"


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.customized = __file__")
    code = "import sys, sitecustomize, horovod; print(sys.customized == sitecustomize.__file__)"
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    assert run("-c", code, PYTHONPATH=path) == "True\n"


def test_no_arguments_is_a_usage_error() -> None:
    done = python(*AS_HOROVOD)
    assert done.returncode != 0
    assert "usage" in done.stderr


def test_a_process_knows_whether_it_uses_the_name() -> None:
    for module, known in (("horovod", True), ("horovod.common", True), ("hvdlite.common", False)):
        code = (
            "from hvdlite.as_horovod import active; before = active(); "
            f"import {module}; print(before, active())"
        )
        assert run("-c", code).split() == ["False", str(known)]


@pytest.mark.usefixtures("launcher")
def test_under_the_launcher(script: Path) -> None:
    """Horovod's variables are there beside those of hvdlite."""
    script.write_text(SCRIPT + "import os\nhvd.init()\n" + TELL)
    words = ("--as-horovod", "-np", "2", sys.executable)
    done = launch(*words, str(script), HOROVOD_CYCLE_TIME="1")
    assert done.stdout.count("answered __main__ []") == 2, done.stderr
    assert done.stdout.count("HVDLITE True HOROVOD True") == 2
    assert done.returncode == 0


def test_importing_hvdlite_is_cheap() -> None:
    code = (
        "import sys; before = set(sys.modules); import hvdlite\n"
        "assert 'importlib.metadata' not in set(sys.modules) - before\n"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = python("-c", code)
    assert set(eval(done.stdout)) <= {"hvdlite", "typing", "__future__", "collections", "functools",
                                      "operator", "itertools", "keyword", "reprlib", "re", "enum",
                                      "types", "copyreg", "contextlib", "_collections_abc",
                                      "abc", "warnings", "_typing", "_functools", "_operator",
                                      "_collections", "_sre", "importlib"}  # fmt: skip
