"""The public functions for states of PyTorch: safetensors, or DCP where there are DTensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hvdlite.checkpoint import trees
from hvdlite.checkpoint.folder import MANIFEST, Folder
from hvdlite.checkpoint.forms import CheckpointForms
from hvdlite.checkpoint.job import together
from hvdlite.checkpoint.loading import Options
from hvdlite.checkpoint.tensors import Owner
from hvdlite.common.layouts.layout import Layout
from hvdlite.torch.checkpoint.tensors import TorchTensors, is_dtensor


class TorchForms(CheckpointForms):
    """Checkpoints whose states may have DTensors."""

    def __init__(self) -> None:
        super().__init__(TorchTensors())

    def save(
        self,
        directory: str | os.PathLike[str],
        state: Any,
        layouts: Mapping[str, Any] | None = None,
    ) -> None:
        folder = Folder(directory)
        # Ranks of a pipeline hold different tensors: one of them with DTensors is enough.
        if any(together(f"save of {folder.path}", lambda: self._has_dtensors(state))):
            from hvdlite.torch.checkpoint import dcp

            dcp.save(folder, state, layouts, self._tensors)
        else:
            super().save(directory, state, layouts)

    def load(
        self,
        directory: str | os.PathLike[str],
        state: Any,
        layouts: Mapping[str, Any] | None = None,
        strict: bool = True,
        *,
        cast: bool = False,
        verify: bool = False,
    ) -> Any:
        folder = Folder(directory)
        if together(f"load of {folder.path}", lambda: _is_of_dcp(folder))[0]:
            from hvdlite.torch.checkpoint import dcp

            return dcp.load(folder, state, layouts, self._tensors, Options(strict, cast))
        return super().load(directory, state, layouts, strict, cast=cast, verify=verify)

    def consolidate(self, src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
        source = Folder(src)
        if together(f"consolidation of {source.path}", lambda: _is_of_dcp(source))[0]:
            from hvdlite.torch.checkpoint import dcp

            dcp.consolidate(source, Folder(dst), self._tensors)
        else:
            super().consolidate(src, dst)

    def _has_dtensors(self, state: Any) -> bool:
        return _has_dtensors(trees.expand(state, self._tensors, None))

    def infer_layout(
        self, module: Any, *predict_data: Any, strategies: Any = None, mesh: Any = None
    ) -> dict[str, Layout]:
        if not predict_data:
            return super().infer_layout(module, strategies=strategies, mesh=mesh)
        from hvdlite.torch.sharding import plan

        return plan(module, predict_data, strategies, mesh).layouts

    infer_layout.__doc__ = CheckpointForms.infer_layout.__doc__
    save.__doc__ = CheckpointForms.save.__doc__
    load.__doc__ = CheckpointForms.load.__doc__
    consolidate.__doc__ = CheckpointForms.consolidate.__doc__


def _has_dtensors(tree: Any) -> bool:
    tree = tree.expanded if isinstance(tree, Owner) else tree
    if isinstance(tree, dict):
        return any(map(_has_dtensors, tree.values()))
    if isinstance(tree, list):
        return any(map(_has_dtensors, tree))
    return is_dtensor(tree)


def _is_of_dcp(folder: Folder) -> bool:
    try:
        path = folder.existing()
    except FileNotFoundError:  # which load() raises on all ranks
        return False
    return not (path / MANIFEST).is_file()
