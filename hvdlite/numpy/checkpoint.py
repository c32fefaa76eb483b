"""Checkpoints of numpy arrays that are cut among ranks.

layouts = {"weights": Layout([4], [0, -1])}  # this rank holds a quarter of the rows
hvd.checkpoint.save("model", {"weights": rows, "step": 100}, layouts)
hvd.checkpoint.load("model", {"weights": all_rows, "step": 0})  # with any number of ranks
"""

from __future__ import annotations

from hvdlite.checkpoint.forms import PUBLIC, CheckpointForms
from hvdlite.checkpoint.tensors import Tensors
from hvdlite.common.layouts.layout import Layout

_forms = CheckpointForms(Tensors())

save = _forms.save
load = _forms.load
consolidate = _forms.consolidate
infer_layout = _forms.infer_layout
infer_predict_layout = _forms.infer_predict_layout
ranks_needed = _forms.ranks_needed
load_distributed_checkpoint = _forms.load_distributed_checkpoint

__all__ = ["Layout", *PUBLIC]  # noqa: PLE0604 - they are strings
