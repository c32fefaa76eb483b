"""Checkpoints of models and optimizers of Keras, on any backend.

state = {"model": model, "optimizer": model.optimizer, "epoch": epoch}
hvd.checkpoint.save("checkpoint", state)
epoch = hvd.checkpoint.load("checkpoint", state)["epoch"]  # with any number of ranks
"""

from __future__ import annotations

from hvdlite.checkpoint import public
from hvdlite.checkpoint.forms import CheckpointForms
from hvdlite.checkpoint.public import *  # noqa: F403
from hvdlite.checkpoint.tensors import VariableTensors

globals().update(public.functions_of(CheckpointForms(VariableTensors())))
__all__ = [*public.__all__]  # noqa: PLE0604 - they are strings
