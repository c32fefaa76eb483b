"""Second names give the very same modules, and no framework is imported that nobody has named."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import hvdlite
from hvdlite.module_aliases import OWN_NAMES, own_name
from tests.forks import NUMPY, TORCH
from tests.parallel.jobs import run_command

PACKAGE = Path(hvdlite.__file__).parent


def run(code: str, preload: tuple[str, ...] = NUMPY) -> str:
    """The output of a process that has imported the modules `preload`, and runs a program."""
    done = run_command([sys.executable, "-c", code], timeout=200, preload=preload)
    assert done.returncode == 0, done.stdout
    return done.stdout


def imported(code: str, preload: tuple[str, ...] = NUMPY) -> set[str]:
    """Which frameworks such a process has imported."""
    lean = "import sys; sys.modules.update(matplotlib=None, sklearn=None)\n"  # As in tests.lean.
    shown = run(f"{lean}{code}\nprint('\\n', *sys.modules)", preload).splitlines()[-1]
    found = {name.partition(".")[0] for name in shown.split()}
    return {"jax", "keras", "tensorflow", "tf_keras", "torch"} & found


def test_a_second_name_holds_for_all_below_it() -> None:
    assert own_name("hvdlite.tensorflow") == "hvdlite.tf"
    assert own_name("hvdlite.tensorflow.mpi_ops") == "hvdlite.tf.mpi_ops"
    assert own_name("hvdlite.tf.keras.callbacks") == "hvdlite.keras.callbacks"
    assert own_name("hvdlite.tensorflow.keras") == "hvdlite.keras"
    for name in ("hvdlite", "hvdlite.torch", "hvdlite.tf", "hvdlite.tensorflows", "tensorflow"):
        assert own_name(name) == name


@pytest.mark.tf
def test_second_names_give_the_same_modules() -> None:
    pytest.importorskip("tensorflow", reason="the extra 'tensorflow' is not installed")
    frameworks = imported(
        "import hvdlite.tensorflow.mpi_ops, hvdlite.tf, hvdlite.tensorflow.keras.callbacks\n"
        "import hvdlite.keras, hvdlite.tf.keras.callbacks\n"
        "from hvdlite.tensorflow import compression, mpi_ops\n"
        "assert hvdlite.tensorflow is hvdlite.tf\n"
        "assert mpi_ops is hvdlite.tensorflow.mpi_ops is hvdlite.tf.mpi_ops\n"
        "assert compression is hvdlite.tf.compression\n"
        "assert hvdlite.tensorflow.keras is hvdlite.keras is hvdlite.tf.keras\n"
        "assert hvdlite.tensorflow.keras.callbacks is hvdlite.keras.callbacks\n"
        "import sys; assert not [n for n in sys.modules if n.endswith('.compute_service')]\n"
        "import hvdlite.tensorflow.data.compute_service as service\n"
        "assert service is hvdlite.tf.data.compute_service\n"
        "assert hvdlite.tf.__spec__.name == hvdlite.tf.__name__ == 'hvdlite.tf'\n"
        "hvdlite.tf.init(); hvdlite.tf.shutdown()"
    )
    assert "torch" not in frameworks


@pytest.mark.tf
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


ADAPTERS = [
    ("hvdlite.numpy", "hvdlite"),
    ("hvdlite.torch", "torch"),
    ("hvdlite.tf", "tensorflow"),
    ("hvdlite.tensorflow", "tensorflow"),
    ("hvdlite.keras", "keras"),
]


@pytest.mark.tf
@pytest.mark.parametrize(("adapter", "needed"), ADAPTERS)
def test_elastic_training_is_a_module_of_each_adapter(adapter: str, needed: str) -> None:
    pytest.importorskip(needed)
    module = importlib.import_module(adapter)
    assert module.elastic is importlib.import_module(f"{adapter}.elastic")
    assert callable(module.elastic.run)
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        _ = module.nonsense


@pytest.mark.parametrize("name", ["init", "DistributedOptimizer", "torhc"])
def test_who_imports_hvdlite_alone_is_told_of_its_modules(name: str) -> None:
    wanted = rf"no attribute '{name}': use import hvdlite\.torch as hvd \((.*)\)$"
    with pytest.raises(AttributeError, match=wanted) as raised:
        getattr(hvdlite, name)
    others = re.findall(r"(?<= )\.\w+", str(raised.value))
    assert len(others) == 4
    for other in others:
        assert find_spec(f"hvdlite{other}") is not None
    with pytest.raises(AttributeError, match=r"no attribute '__nonsense__'$"):
        _ = hvdlite.__nonsense__


def test_who_has_not_imported_a_module_is_told_of_that_one() -> None:
    code = (
        "import hvdlite\ntry:\n    hvdlite.spark\nexcept AttributeError as error:\n    print(error)"
    )
    assert run(code).endswith("no attribute 'spark': use import hvdlite.spark\n")


def test_who_imports_horovod_alone_is_told_of_its_modules() -> None:
    code = (
        "import hvdlite.as_horovod; hvdlite.as_horovod.install()\n"
        "import horovod\n"
        "try: horovod.init()\n"
        "except AttributeError as error: print(error)\n"
    )
    said = "use import horovod.torch as hvd (or .tensorflow, .keras)\n"
    assert run(code) == f"module 'horovod' has no attribute 'init': {said}"


def test_horovods_modules_of_elastic_training_are_those_of_hvdlite() -> None:
    code = (
        "import hvdlite.as_horovod; hvdlite.as_horovod.install()\n"
        "import hvdlite.common.elastic\n"
        "import horovod.common.elastic as elastic\n"
        "from horovod.common import exceptions\n"
        "from hvdlite.common.base import errors\n"
        "assert elastic is hvdlite.common.elastic\n"
        "assert exceptions.HostsUpdatedInterrupt is errors.HostsUpdatedInterrupt\n"
        "print(*sorted(elastic.__all__))\n"
    )
    assert run(code).split() == ["ObjectState", "State", "notification_manager", "run_fn"]


@pytest.mark.tf
@pytest.mark.parametrize(
    ("module", "names", "needed"),
    [
        ("torch.elastic", ["ElasticSampler", "TorchState", "run", "sampler", "state"], "torch"),
        ("torch.elastic.sampler", ["ElasticSampler"], "torch"),
        (
            "torch.elastic.state",
            [
                "ModelStateHandler",
                "OptimizerStateHandler",
                "SamplerStateHandler",
                "StateHandler",
                "TorchState",
                "get_handler_registry",
                "set_handler_registry",
            ],
            "torch",
        ),
        ("tensorflow.elastic", ["TensorFlowKerasState", "TensorFlowState", "run"], "tensorflow"),
        *(
            (
                module,
                [
                    "CommitStateCallback",
                    "KerasState",
                    "UpdateBatchStateCallback",
                    "UpdateEpochStateCallback",
                    "run",
                ],
                "keras",
            )
            for module in ("keras.elastic", "tensorflow.keras.elastic")
        ),
    ],
)
def test_horovods_names_of_elastic_training(module: str, names: list[str], needed: str) -> None:
    pytest.importorskip(needed)
    found = importlib.import_module(f"hvdlite.{module}")
    assert [name for name in names if not hasattr(found, name)] == []


def test_horovods_modules_of_elastic_training_are_there() -> None:
    code = (
        "import hvdlite.as_horovod; hvdlite.as_horovod.install()\n"
        "from horovod.common.elastic import run_fn\n"
        "from horovod.runner.elastic.driver import ElasticDriver\n"
        "print(run_fn.__module__, ElasticDriver.__module__)\n"
    )
    assert run(code).split() == [
        "hvdlite.common.elastic.run",
        "hvdlite.launcher.elastic.horovod_driver",
    ]


@pytest.mark.tf
def test_a_framework_is_imported_only_for_its_own_users() -> None:
    start = "as hvd; hvd.init(); hvd.shutdown()"
    assert imported(f"import hvdlite.data, hvdlite.launcher, hvdlite.numpy {start}") == set()
    if find_spec("torch"):
        assert imported(f"import hvdlite.torch {start}", TORCH) == {"torch"}


def test_editors_find_the_second_names() -> None:
    for second in (*OWN_NAMES, "hvdlite.tensorflow.keras"):
        folder = PACKAGE.joinpath(*second.split(".")[1:])
        stubs = [*folder.glob("*.pyi")] or [folder.with_suffix(".pyi")]
        for stub in stubs:
            module = ".".join(stub.with_suffix("").relative_to(PACKAGE.parent).parts)
            module = module.removesuffix(".__init__")
            assert f"from {own_name(module)} import *\n" in stub.read_text()


def test_every_package_is_installed() -> None:
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    launcher = PACKAGE.parent / "launcher"
    folders = [Path("hvdlite", "launcher", path.parent.relative_to(launcher))
               for path in launcher.rglob("__init__.py")]  # fmt: skip
    folders += [path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("__init__.py")]
    packages = {".".join(folder.parts) for folder in folders}
    assert packages == set(settings["tool"]["setuptools"]["packages"])
