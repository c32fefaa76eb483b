"""The public API does not change unnoticed: a golden file has one signature a line.

After a change that is meant: ``python -m tests.test_public_api`` writes the files anew.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hvdlite.common.gradients.arguments import PLACE

HERE = Path(__file__).parent
NUMPY_FILE = HERE / "public_api_numpy.txt"
TORCH_FILE = HERE / "torch" / "public_api.txt"
TF_FILE = HERE / "tf" / "public_api.txt"
JAX_FILE = HERE / "jax" / "public_api.txt"
KERAS_FILE = HERE / "keras" / "public_api.txt"
RAY_FILE = HERE / "ray" / "public_api.txt"
SPARK_FILE = HERE / "spark" / "public_api.txt"
ELASTIC_FILES = {
    "hvdlite.common.elastic": HERE / "common" / "elastic" / "public_api.txt",
    "hvdlite.numpy.elastic": HERE / "public_api_numpy_elastic.txt",
    "hvdlite.torch.elastic": HERE / "torch" / "public_api_elastic.txt",
    "hvdlite.torch.elastic.sampler": HERE / "torch" / "public_api_elastic_sampler.txt",
    "hvdlite.torch.elastic.state": HERE / "torch" / "public_api_elastic_state.txt",
    "hvdlite.tf.elastic": HERE / "tf" / "public_api_elastic.txt",
    "hvdlite.jax.elastic": HERE / "jax" / "public_api_elastic.txt",
    "hvdlite.keras.elastic": HERE / "keras" / "public_api_elastic.txt",
}
SHARDING_FILES = {
    "hvdlite.numpy.checkpoint": HERE / "public_api_numpy_checkpoint.txt",
    "hvdlite.torch.checkpoint": HERE / "torch" / "public_api_checkpoint.txt",
    "hvdlite.torch.ps": HERE / "torch" / "public_api_ps.txt",
    "hvdlite.torch.sharding": HERE / "torch" / "public_api_sharding.txt",
}
PS_FILES = {
    f"hvdlite.{name}.ps": HERE / "ps" / f"public_api_{name}.txt"
    for name in ("numpy", "tf", "jax", "keras")
}


def signatures(module: ModuleType) -> list[str]:
    """One line for each public name: names and defaults of parameters, or the value."""
    return [_line(name, getattr(module, name)) for name in sorted(module.__all__)]


def _line(name: str, value: Any) -> str:
    if isinstance(value, type):
        options = {key: each for key, each in vars(value).items() if isinstance(each, type)}
        if options:
            return f"class {name}: {', '.join(sorted(options))}"
        return f"class {name}{_parameters(value)}"
    if callable(value):
        return f"{name}{_parameters(value)}"
    if isinstance(value, ModuleType):
        return f"module {name}: {', '.join(sorted(value.__all__))}"
    return f"{name} = {_text(value)}"


def _parameters(function: Any) -> str:
    parameters = [*inspect.signature(function).parameters.values()]
    if isinstance(function, type) and [each.name for each in parameters] == ["args", "kwargs"]:
        # An older Keras says no more of its layers: their __new__ takes everything.
        parameters = [*inspect.signature(function.__init__).parameters.values()][1:]
    return f"({', '.join(_parameter(each) for each in parameters)})"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    name = stars.get(parameter.kind, "") + parameter.name
    if parameter.default is parameter.empty:
        return name
    return f"{name}={_text(parameter.default)}"


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{value.value}"
    if isinstance(value, type):
        return value.__name__
    if type(value).__name__ == "ProcessSet":
        return "global_process_set"
    return repr(value)


def golden(path: Path) -> list[str]:
    """The lines of a golden file."""
    return path.read_text().splitlines()


def unexplained(function: Any) -> list[str]:
    """The parameters that the docstring of a distributed optimizer or tape does not explain."""
    explained = str(function.__doc__)
    assert PLACE not in explained
    return [name for name in inspect.signature(function).parameters if f"`{name}`" not in explained]


def test_numpy() -> None:
    module = importlib.import_module("hvdlite.numpy")
    assert signatures(module) == golden(NUMPY_FILE)


@pytest.mark.parametrize(
    ("name", "needed", "file"),
    [
        pytest.param("hvdlite.ray", "ray", RAY_FILE, marks=pytest.mark.ray),
        pytest.param("hvdlite.spark", "pyspark", SPARK_FILE, marks=pytest.mark.spark),
    ],
)
def test_clusters(name: str, needed: str, file: Path) -> None:
    pytest.importorskip(needed)
    assert signatures(importlib.import_module(name)) == golden(file)


@pytest.mark.tf
@pytest.mark.parametrize("name", ELASTIC_FILES)
def test_elastic_training(name: str) -> None:
    framework = {"tf": "tensorflow"}.get(name.split(".")[1], name.split(".")[1])
    if framework in ("torch", "tensorflow", "jax", "keras"):
        pytest.importorskip(framework)
    assert signatures(importlib.import_module(name)) == golden(ELASTIC_FILES[name])


@pytest.mark.tf
@pytest.mark.parametrize("name", PS_FILES)
def test_parameter_servers(name: str) -> None:
    framework = name.split(".")[1]
    pytest.importorskip({"tf": "tensorflow"}.get(framework, framework))
    pytest.importorskip("safetensors")
    assert signatures(importlib.import_module(name)) == golden(PS_FILES[name])


@pytest.mark.parametrize("name", SHARDING_FILES)
@pytest.mark.thorough
def test_checkpoints_and_sharding(name: str) -> None:
    if ".torch." in name:
        pytest.importorskip("torch")
    assert signatures(importlib.import_module(name)) == golden(SHARDING_FILES[name])


@pytest.mark.tf
@pytest.mark.torch
def test_checkpoints_are_the_same_in_all_frameworks() -> None:
    for name in ("torch", "tensorflow", "jax", "keras"):
        pytest.importorskip(name)
    first = signatures(importlib.import_module("hvdlite.numpy.checkpoint"))
    for name in ("torch", "tf", "jax", "keras"):
        assert signatures(importlib.import_module(f"hvdlite.{name}.checkpoint")) == first


if __name__ == "__main__":
    files = {
        "hvdlite.numpy": NUMPY_FILE,
        "hvdlite.torch": TORCH_FILE,
        "hvdlite.tf": TF_FILE,
        "hvdlite.jax": JAX_FILE,
        "hvdlite.keras": KERAS_FILE,
        "hvdlite.ray": RAY_FILE,
        "hvdlite.spark": SPARK_FILE,
        **ELASTIC_FILES,
        **SHARDING_FILES,
        **PS_FILES,
    }
    for name, path in files.items():
        path.write_text("\n".join(signatures(importlib.import_module(name))) + "\n")
        sys.stdout.write(f"{path}\n")
