"""What the processes of a soak need besides: Keras, on PyTorch, which survives a fork."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras

import hvdlite.keras.ps  # noqa: F401 - for those that are forked from this process
from tests.ps import preloaded  # noqa: F401

keras.optimizers.SGD(1.0).build([keras.Variable([1.0])])
