"""Checkpoints of models and optimizers of PyTorch, whole or cut among ranks.

state = {"model": model, "optimizer": optimizer, "epoch": epoch}
hvd.checkpoint.save("checkpoint", state)
epoch = hvd.checkpoint.load("checkpoint", state)["epoch"]  # with any number of ranks

Tensors with layouts, and whole ones, are written as safetensors; a state with DTensors is written
by PyTorch's distributed checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hvdlite.checkpoint import public, trees
from hvdlite.checkpoint.job import in_turn, together
from hvdlite.checkpoint.loading import Options
from hvdlite.checkpoint.manifest import DCP_METADATA, MANIFEST, Folder
from hvdlite.checkpoint.opened import ATTEMPTS
from hvdlite.checkpoint.public import *  # noqa: F403
from hvdlite.checkpoint.public import CheckpointForms
from hvdlite.checkpoint.tensors import Owner, Tensors
from hvdlite.common.layouts.layout import Layout
from hvdlite.torch.checkpoint.tensors import TorchTensors, is_dtensor


class TorchForms(CheckpointForms):
    """Checkpoints whose states may have DTensors."""

    def __init__(self) -> None:
        super().__init__(TorchTensors())

    def _save(
        self, folder: Folder, state: Any, layouts: Mapping[str, Any] | None, tensors: Tensors
    ) -> None:
        # Ranks of a pipeline hold different tensors: one of them with DTensors is enough.
        if any(
            together(
                f"save of {folder.path}", lambda: _has_dtensors(trees.expand(state, tensors, None))
            )
        ):
            from hvdlite.torch.checkpoint import dcp

            dcp.save(folder, state, layouts, tensors)
        else:
            super()._save(folder, state, layouts, tensors)

    def _load(
        self,
        folder: Folder,
        state: Any,
        layouts: Mapping[str, Any] | None,
        tensors: Tensors,
        options: Options,
    ) -> Any:
        if together(f"load of {folder.path}", lambda: _is_of_dcp(folder))[0]:
            from hvdlite.torch.checkpoint import dcp

            return dcp.load(folder, state, layouts, tensors, options)
        return super()._load(folder, state, layouts, tensors, options)

    @in_turn
    def consolidate(self, src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
        source = Folder(src)
        if together(f"consolidation of {source.path}", lambda: _is_of_dcp(source))[0]:
            from hvdlite.torch.checkpoint import dcp

            dcp.consolidate(source, Folder(dst), self._tensors)
        else:
            super().consolidate(src, dst)

    def infer_layout(
        self, module: Any, *predict_data: Any, strategies: Any = None, mesh: Any = None
    ) -> dict[str, Layout]:
        if not predict_data:
            if strategies is not None or mesh is not None:
                raise ValueError(
                    "strategies and meshes need predict_data: an input of the whole batch, or "
                    "several, which the operators are found with; meta tensors do"
                )
            return super().infer_layout(module)
        from hvdlite.torch.sharding import plan

        layouts = plan(module, predict_data, strategies, mesh).layouts
        return {name: layouts[name] for name in self._shapes(module)}

    infer_layout.__doc__ = CheckpointForms.infer_layout.__doc__
    consolidate.__doc__ = CheckpointForms.consolidate.__doc__


def _has_dtensors(tree: Any) -> bool:
    tree = tree.expanded if isinstance(tree, Owner) else tree
    if isinstance(tree, dict):
        return any(map(_has_dtensors, tree.values()))
    if isinstance(tree, list):
        return any(map(_has_dtensors, tree))
    return is_dtensor(tree)


def _is_of_dcp(folder: Folder) -> bool:
    for _ in range(ATTEMPTS):
        try:
            path = folder.existing()
        except FileNotFoundError:  # which load() raises on all ranks
            return False
        for name in (MANIFEST, DCP_METADATA):
            if (path / name).is_file():
                return name == DCP_METADATA
        # There is neither: a save has just renamed it.
    return False


globals().update(public.functions_of(TorchForms()))
__all__ = [*public.__all__]  # noqa: PLE0604 - they are strings
