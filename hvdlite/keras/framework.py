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

_ADAPTERS = {"tensorflow": "hvdlite.tf", "torch": "hvdlite.torch"}


def backend_of(package: Any) -> str:
    """Return the name of the backend of this Keras.

    Raises `NotImplementedError` for a backend that hvdlite has no adapter for.
    """
    backend: str = package.backend.backend()
    if backend not in _ADAPTERS:
        supported = " and ".join(sorted(_ADAPTERS))
        raise NotImplementedError(
            f"hvdlite.keras works with the Keras backends {supported}, and this is {backend}: set "
            "KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch"
        )
    return backend


@cache
def adapter() -> ModuleType:
    """Return the module whose collectives take the tensors of Keras' backend.

    Raises `NotImplementedError` as `backend_of` does.
    """
    return import_module(_ADAPTERS[backend_of(keras)])
