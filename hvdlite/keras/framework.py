"""Which Keras is in use, and which adapter carries the tensors of its backend."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from hvdlite.missing_names import with_remedy

# TensorFlow's own rule for what tf.keras is.
LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")
PACKAGE = "tf_keras" if LEGACY else "keras"  # Keras 2, or Keras 3
REMEDY = "pip install --no-deps tf_keras" if LEGACY else "pip install 'hvdlite[tensorflow-cpu]'"
try:
    keras: Any = import_module(PACKAGE)
except ModuleNotFoundError as error:
    raise with_remedy(error, PACKAGE, REMEDY) from None

_ADAPTERS = {"jax": "hvdlite.jax", "tensorflow": "hvdlite.tf", "torch": "hvdlite.torch"}


def backend_of(package: Any) -> str:
    """Return the name of the backend of this Keras.

    Raises `NotImplementedError` for a backend that hvdlite has no adapter for.
    """
    backend: str = package.backend.backend()
    if backend not in _ADAPTERS:
        *others, last = sorted(_ADAPTERS)
        raise NotImplementedError(
            f"hvdlite.keras works with the Keras backends {', '.join(others)} and {last}, and this "
            f"is {backend}: set KERAS_BACKEND to one of them"
        )
    return backend


def tools() -> ModuleType:
    """Return the module beside this one that knows the backend of Keras.

    Raises `NotImplementedError` as `backend_of` does.
    """
    return import_module(f"hvdlite.keras.on_{backend_of(keras)}")


def attach_state(model: Any) -> None:
    """Give the variables of a model, and of its optimizer, the values that they have now.

    During an epoch of `fit` with JAX only the training step has them.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def wait_for_programs() -> None:
    """Wait for the steps that this thread has begun: `fit` with JAX goes on while they run."""
    wait = getattr(tools(), "wait_for_programs", None)
    if wait is not None:
        wait()


@cache
def adapter() -> ModuleType:
    """Return the module whose collectives take the tensors of Keras' backend.

    Raises `NotImplementedError` as `backend_of` does.
    """
    return import_module(_ADAPTERS[backend_of(keras)])
