"""Models with a distributed optimizer: what is saved of them, and how they are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.keras as hvd
from hvdlite.common.settings.config import Config
from hvdlite.keras.framework import LEGACY, keras
from hvdlite.keras.subclass import Distributed
from hvdlite.keras.variables import optimizer_variables
from tests.keras.training import (
    EAGERLY,
    adam,
    assert_close,
    assert_same,
    batches_of,
    fit,
    make_model,
    numpy_of,
    sgd,
)
from tests.ranks import run_ranks

keras3_only = pytest.mark.skipif(LEGACY, reason="new in Keras 3")
OPTIMIZERS: list[Any] = [sgd, adam]
if LEGACY:
    OPTIMIZERS.append(lambda: keras.optimizers.legacy.Adam(0.01))
# Where Keras itself finds the state of an optimizer again.
FOUND = [(".keras", sgd), (".keras", adam)]
if LEGACY:
    FOUND += [(".h5", make) for make in OPTIMIZERS]

LOAD = """
import sys
sys.modules["hvdlite"] = None
import numpy as np
keras = __import__(sys.argv[1])
model = keras.models.load_model(sys.argv[2])
assert type(model.optimizer).__module__.startswith(sys.argv[1] + ".src."), model.optimizer
model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)
"""


@keras.saving.register_keras_serializable(package="tests")
class Registered(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer that Keras knows by a name of the user's."""


class Own(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer that Keras does not know."""


def variables_of(optimizer: Any) -> list[np.ndarray]:
    variables = optimizer.variables
    return numpy_of(variables() if callable(variables) else variables)


def save(optimizer: Any, path: Path) -> list[np.ndarray]:
    """Train a model with a distributed optimizer, and save it; the optimizer's variables."""
    model = make_model()
    hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), **EAGERLY)
    model.fit(**batches_of(0, 1), verbose=0)
    model.save(path)
    return variables_of(optimizer)


@pytest.mark.parametrize(("ending", "make"), FOUND)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_load_model_goes_on_where_it_was(make: Any, ending: str, tmp_path: Path) -> None:
    """Half of the training, then the other half, are the whole."""

    def train(rank: int) -> list[np.ndarray]:
        path = tmp_path / f"{rank}{ending}"
        model = make_model()
        fit(model, hvd.DistributedOptimizer(make()), rank, 2, **EAGERLY)
        model.save(path)
        loaded = hvd.load_model(path)
        assert isinstance(loaded.optimizer, Distributed)
        for mine, other in zip(
            variables_of(loaded.optimizer), variables_of(model.optimizer), strict=True
        ):
            np.testing.assert_array_equal(mine, other)
        for each in (model, loaded):
            each.fit(**batches_of(rank, 2), verbose=0)
        assert_close(numpy_of(loaded.get_weights()), numpy_of(model.get_weights()))
        return numpy_of(loaded.get_weights())

    assert_same(run_ranks(2, train))


def test_one_rank_loads_what_the_others_build(tmp_path: Path) -> None:
    """Keras begins the paths of variables that were loaded without the name of their model."""
    path = tmp_path / "model.keras"
    saved = make_model()
    fit(saved, adam())
    saved.save(path)

    def main(rank: int) -> list[Any]:
        if rank == 1:
            model = hvd.load_model(path)
        else:
            model = make_model()
            model.compile(hvd.DistributedOptimizer(adam()), keras.losses.MeanSquaredError())
        begin = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
        model.fit(**batches_of(rank, 2), verbose=0, callbacks=[begin])
        return numpy_of(model.get_weights())

    found = run_ranks(2, main, config=Config(check_weights=1))
    assert_same(found)
    saved.fit(**batches_of(0, 1), verbose=0)
    assert_close(found[0], numpy_of(saved.get_weights()))


@pytest.mark.parametrize("make", OPTIMIZERS[1:])
def test_the_file_loads_without_hvdlite(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    run_ranks(1, lambda rank: save(make(), path))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, keras.__name__, str(path)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("make", [*OPTIMIZERS, lambda: Registered(0.1)])
def test_the_config_is_that_of_the_original(make: Any) -> None:
    def serialize(rank: int) -> None:
        optimizer = make()
        plain = keras.saving.serialize_keras_object(optimizer)
        saved = keras.saving.serialize_keras_object(hvd.DistributedOptimizer(optimizer))
        registered = plain.pop("registered_name") or f"Custom>{plain['class_name']}"
        assert registered.endswith(saved["registered_name"])
        assert {**saved, **plain} == saved
        again = keras.saving.deserialize_keras_object(saved)
        assert type(again) is type(make())

    run_ranks(1, serialize)


@pytest.mark.parametrize("around", [False, pytest.param(True, marks=keras3_only)])
def test_a_step_that_has_not_ended_is_not_saved(around: bool, tmp_path: Path) -> None:
    """Any optimizer of this class can be loaded from it, and goes on."""
    path = tmp_path / "model.keras"

    def check(rank: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(adam(), backward_passes_per_step=2)
        if around:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
        model.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), **EAGERLY)
        model.fit(**batches_of(0, 1), verbose=0)  # three passes
        model.save(path)
        loaded = keras.models.load_model(path)
        kept = numpy_of(optimizer_variables(model.optimizer))
        for mine, other in zip(variables_of(loaded.optimizer), kept, strict=True):
            np.testing.assert_array_equal(mine, other)
        loaded.fit(**batches_of(0, 1), verbose=0)
        model.load_weights(path)

    run_ranks(1, check)


@pytest.mark.parametrize("cls", [Registered, Own])
def test_optimizers_that_are_not_part_of_keras(cls: type, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"

    def check(rank: int) -> None:
        saved = save(cls(0.1, momentum=0.5), path)
        for custom in ({"custom_optimizers": [cls]}, {"custom_objects": {cls.__name__: cls}}):
            model = hvd.load_model(path, **custom)
            assert isinstance(model.optimizer, cls) and isinstance(model.optimizer, Distributed)
            for mine, other in zip(variables_of(model.optimizer), saved, strict=True):
                np.testing.assert_array_equal(mine, other)

    run_ranks(1, check)


def test_load_model_compresses(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"

    def check(rank: int) -> None:
        save(sgd(), path)
        model = hvd.load_model(path, compression=hvd.Compression.fp16)
        assert model.optimizer._hvdlite_settings.reduction.compression is hvd.Compression.fp16

    run_ranks(1, check)


def test_a_model_without_an_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    make_model().save(path)
    model = run_ranks(1, lambda rank: hvd.load_model(path))[0]
    assert_close(numpy_of(model.get_weights()), numpy_of(make_model().get_weights()))


@keras3_only
def test_a_loss_scaler_that_compile_has_made(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"

    def check(rank: int) -> None:
        keras.mixed_precision.set_global_policy("mixed_float16")  # of this thread
        model = make_model()
        fit(model, hvd.DistributedOptimizer(sgd()), **EAGERLY)
        model.save(path)
        with zipfile.ZipFile(path) as file:
            config = json.loads(file.read("config.json"))["compile_config"]["optimizer"]
        assert "hvdlite" not in json.dumps(config)
        loaded = hvd.load_model(path)
        assert isinstance(loaded.optimizer, Distributed)
        assert type(loaded.optimizer).__name__ == "LossScaleOptimizer"
        for mine, other in zip(
            variables_of(loaded.optimizer), variables_of(model.optimizer), strict=True
        ):
            np.testing.assert_array_equal(mine, other)
        loaded.fit(**batches_of(0, 1), verbose=0)

    run_ranks(1, check)
