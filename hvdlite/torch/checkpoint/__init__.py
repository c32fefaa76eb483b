"""Checkpoints of models and optimizers of PyTorch, whole or cut among ranks.

state = {"model": model, "optimizer": optimizer, "epoch": epoch}
hvd.checkpoint.save("checkpoint", state)
epoch = hvd.checkpoint.load("checkpoint", state)["epoch"]  # with any number of ranks

Tensors with layouts, and whole ones, are written as safetensors; a state with DTensors is written
by PyTorch's distributed checkpoints.
"""

from __future__ import annotations

from hvdlite.common.layouts.layout import Layout
from hvdlite.torch.checkpoint.forms import TorchForms

_forms = TorchForms()

save = _forms.save
load = _forms.load
consolidate = _forms.consolidate
infer_layout = _forms.infer_layout
infer_predict_layout = _forms.infer_predict_layout
ranks_needed = _forms.ranks_needed
load_distributed_checkpoint = _forms.load_distributed_checkpoint

__all__ = [
    "Layout",
    "consolidate",
    "infer_layout",
    "infer_predict_layout",
    "load",
    "load_distributed_checkpoint",
    "ranks_needed",
    "save",
]
