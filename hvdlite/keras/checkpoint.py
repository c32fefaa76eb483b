"""Checkpoints of models and optimizers of Keras, on any backend.

state = {"model": model, "optimizer": model.optimizer, "epoch": epoch}
hvd.checkpoint.save("checkpoint", state)
epoch = hvd.checkpoint.load("checkpoint", state)["epoch"]  # with any number of ranks
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from hvdlite.checkpoint import public
from hvdlite.checkpoint.public import *  # noqa: F403
from hvdlite.checkpoint.public import CheckpointForms
from hvdlite.checkpoint.tensors import Context, Owner, VariableTensors
from hvdlite.keras.optimizer_families import KINDS
from hvdlite.keras.subclass import lasting_only


class KerasTensors(VariableTensors):
    """Models and optimizers, without what these have only until a step ends."""

    def owner(self, thing: Any, context: Context) -> Owner | None:
        """See `VariableTensors`."""
        is_optimizer = any(kind.owns(thing) for kind in KINDS)
        with lasting_only(thing) if is_optimizer else nullcontext():
            return super().owner(thing, context)


globals().update(public.functions_of(CheckpointForms(KerasTensors())))
__all__ = [*public.__all__]  # noqa: PLE0604 - they are strings
