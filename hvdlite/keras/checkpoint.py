"""Checkpoints of models and optimizers of Keras, on any backend.

state = {"model": model, "optimizer": model.optimizer, "epoch": epoch}
hvd.checkpoint.save("checkpoint", state)
epoch = hvd.checkpoint.load("checkpoint", state)["epoch"]  # with any number of ranks
"""

from __future__ import annotations

from hvdlite.checkpoint.forms import PUBLIC, CheckpointForms
from hvdlite.checkpoint.tensors import VariableTensors
from hvdlite.common.layouts.layout import Layout

_forms = CheckpointForms(VariableTensors())

save = _forms.save
load = _forms.load
consolidate = _forms.consolidate
infer_layout = _forms.infer_layout
infer_predict_layout = _forms.infer_predict_layout
ranks_needed = _forms.ranks_needed
load_distributed_checkpoint = _forms.load_distributed_checkpoint

__all__ = ["Layout", *PUBLIC]  # noqa: PLE0604 - they are strings
