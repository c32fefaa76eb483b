"""What the modules `checkpoint` of all frameworks have, under the names that users import.

The functions here are for arrays of numpy; `functions_of` has those of another framework.
"""

from __future__ import annotations

from typing import Any

from hvdlite.checkpoint.forms import CheckpointForms
from hvdlite.checkpoint.tensors import Tensors
from hvdlite.common.layouts.layout import Layout

_forms = CheckpointForms(Tensors())
consolidate = _forms.consolidate
infer_layout = _forms.infer_layout
infer_predict_layout = _forms.infer_predict_layout
load = _forms.load
load_distributed_checkpoint = _forms.load_distributed_checkpoint
ranks_needed = _forms.ranks_needed
save = _forms.save


def functions_of(forms: CheckpointForms) -> dict[str, Any]:
    """Return the functions above by name, as a framework has them.

    A module with all names of this one replaces the functions by them.
    """
    names = [name for name in vars(CheckpointForms) if not name.startswith("_")]
    return {name: getattr(forms, name) for name in names}


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
