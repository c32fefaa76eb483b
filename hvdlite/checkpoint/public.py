"""What the modules `checkpoint` of all frameworks have, under the names that users import.

The functions are written once for all frameworks. Those at the end of this file are for arrays of
numpy; `functions_of` has those of another framework.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdlite.checkpoint import loading, manifest, saving, trees
from hvdlite.checkpoint.files import Array, Reader, safetensors
from hvdlite.checkpoint.job import in_turn, place, together
from hvdlite.checkpoint.manifest import MANIFEST, Folder, Manifest
from hvdlite.checkpoint.opened import Opened, alone
from hvdlite.checkpoint.tensors import Tensors
from hvdlite.checkpoint.trees import flat_layouts, gathered
from hvdlite.common.layouts import transfer
from hvdlite.common.layouts.layout import Layout, whole

PathLike = str | os.PathLike[str]
Layouts = Mapping[str, Any]


class CheckpointForms:
    """`save`, `load` and their company for the tensors of one framework."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    @in_turn
    def save(self, directory: PathLike, state: Any, layouts: Layouts | None = None) -> None:
        """Write the state of all ranks to a folder, which replaces an older checkpoint; blocks.

        `state` is a dict, whose entries may be dicts and lists in turn: tensors, values that JSON
        can hold (those of rank 0 are saved), and objects with tensors, such as models and
        optimizers. Or it is one such object. `layouts` says how tensors are cut among ranks, by
        their names ("model.fc1.weight"), or nested as the state is: a `Layout`, or a list [D, M];
        a tensor without one is whole and equal on all ranks. Each part is written once.

        All ranks call it with a folder that they share. A save that is killed leaves the old
        checkpoint. Raises `ValueError` and `TypeError` for wrong arguments, `OSError`,
        `ImportError` without the package safetensors, and `HorovodInternalError` if ranks disagree
        about a tensor, give different folders, or another rank fails.
        """
        folder = Folder(directory)
        tensors = gathered(f"save of {folder.path}", state, self._tensors)
        self._save(folder, state, layouts, tensors)

    @in_turn
    def load(
        self,
        directory: PathLike,
        state: Any,
        layouts: Layouts | None = None,
        strict: bool = True,
        *,
        cast: bool = False,
        verify: bool = False,
    ) -> Any:
        """Give a state the values of a checkpoint, in place, and return it; blocks.

        `state` and `layouts` are as for `save`; the layouts, and the number of ranks, may be others
        than those of the save. A rank reads what it needs and nothing else. Entries of the
        checkpoint that the state does not have are left out, but for those of optimizers and of
        objects with `load_state_dict`, which get all that was saved of them.

        - `strict`: raise `KeyError` for a name that the checkpoint lacks; else keep it, and warn.
        - `cast`: convert values to the dtypes of the state instead of raising `ValueError`.
        - `verify`: compare the digest of each part that is read, too, where only a piece of it is
          needed, for which the whole part is read.

        Raises `FileNotFoundError`, `ValueError` for other shapes and dtypes and for damaged files,
        `OSError` for a folder that saves replace all the while, `HorovodInternalError` where ranks
        read different checkpoints, and as `save` does. A state may be loaded in part where files
        are damaged.
        """
        folder = Folder(directory)
        tensors = gathered(f"load of {folder.path}", state, self._tensors)
        options = loading.Options(strict, cast, verify)
        return self._load(folder, state, layouts, tensors, options)

    def _save(self, folder: Folder, state: Any, layouts: Layouts | None, tensors: Tensors) -> None:
        saving.save(folder, state, layouts, tensors)

    def _load(
        self,
        folder: Folder,
        state: Any,
        layouts: Layouts | None,
        tensors: Tensors,
        options: loading.Options,
    ) -> Any:
        return loading.load(
            lambda: folder.existing() / MANIFEST,
            manifest.read,
            state,
            layouts,
            tensors,
            options,
            f"load of {folder.path}",
        )

    @in_turn
    def consolidate(self, src: PathLike, dst: PathLike) -> None:
        """Write a checkpoint anew, as one file with whole tensors: ``dst/model.safetensors``.

        Rank 0 does the work, with all of it in memory; all ranks call it, or a process without
        `init`. Raises as `load` does.
        """
        source, target = Folder(src), Folder(dst)
        together(
            f"consolidation of {source.path}",
            lambda: _consolidate(source, target) if place()[0] == 0 else None,
        )

    def infer_layout(
        self, module: Any, *predict_data: Any, strategies: Any = None, mesh: Any = None
    ) -> dict[str, Layout]:
        """Return the layout of each tensor of a model for inference, by its name.

        No weights are read. `strategies` cuts operators of models of PyTorch, which see
        `predict_data`; elsewhere each rank holds whole tensors, and any strategy is a `ValueError`.
        """
        if strategies is not None or mesh is not None:
            raise ValueError("strategies and meshes are for models of PyTorch: hvdlite.torch")
        ranks = place()[1]
        return {name: whole(len(shape), ranks) for name, shape in self._shapes(module).items()}

    def infer_predict_layout(
        self, network: Any, *predict_data: Any, strategies: Any = None, mesh: Any = None
    ) -> dict[str, list[Any]]:
        """Return layouts as `infer_layout` does, in MindSpore's form.

        Each is a list: device matrix, tensor map, shape of a part, 0, True, "".
        """
        layouts = self.infer_layout(network, *predict_data, strategies=strategies, mesh=mesh)
        shapes = self._shapes(network)
        rank = place()[0]
        return {
            name: [
                list(layout.device_matrix),
                list(layout.tensor_map),
                [stop - start for start, stop in layout.box(shapes[name], rank)],
                0,
                True,
                "",
            ]
            for name, layout in layouts.items()
        }

    def _shapes(self, module: Any) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of a model by their names."""
        tensors = self._tensors
        leaves = trees.leaves(trees.expand(module, tensors, None), tensors)
        return {name: tensors.kind(leaf)[1] for name, leaf in leaves if tensors.is_tensor(leaf)}

    def ranks_needed(
        self, src_layouts: Layouts | PathLike, dst_layouts: Layouts, rank: int
    ) -> list[int]:
        """Return the ranks of a save whose files `rank` reads, in rising order.

        `src_layouts` is the folder of a checkpoint, or layouts by name as `dst_layouts`. Names of
        only one of them are left out; of ranks with equal parts, the lowest has written them.
        Raises `ValueError` for a rank that a layout does not have.
        """
        wanted = flat_layouts(dst_layouts)
        shapes: dict[str, Any] = {}
        if isinstance(src_layouts, (str, os.PathLike)):
            source = Folder(src_layouts)
            found = alone(
                f"reading of {source.path}",
                lambda: source.existing() / MANIFEST,
                lambda opened: manifest.read(opened.path),
            )
            held = {name: record.layout for name, record in found.tensors.items()}
            shapes = {name: record.shape for name, record in found.tensors.items()}
        else:
            held = flat_layouts(src_layouts)
        return sorted(
            {
                source
                for name, layout in wanted.items()
                if name in held
                for source in transfer.ranks_needed(held[name], layout, rank, shapes.get(name))
            }
        )

    @in_turn
    def load_distributed_checkpoint(
        self,
        network: Any,
        checkpoint_filenames: Sequence[str],
        predict_strategy: Layouts | None = None,
        train_strategy_filename: PathLike | None = None,
    ) -> Any:
        """Load the files that the ranks of a training job have saved, as MindSpore's function does.

        `checkpoint_filenames` has one file for each of these ranks, in their order.
        `predict_strategy` has the layout of each tensor of `network` now, {name: [D, M, ...]};
        None: whole tensors. `train_strategy_filename` is the layout.json of the training job, None
        the one beside the first file. Returns `network`.

        Raises `TypeError` and `ValueError` for wrong arguments, and as `load` does.
        """
        found = together(
            "load of a distributed checkpoint",
            lambda: _strategy_file(checkpoint_filenames, train_strategy_filename),
        )[place()[0]]
        return loading.load(
            lambda: _existing(found),
            lambda path: _given_files(path, checkpoint_filenames),
            network,
            predict_strategy,
            self._tensors,
            loading.Options(),
            f"load of {found}",
        )


def _strategy_file(filenames: Any, strategy: PathLike | None) -> str:
    if isinstance(filenames, (str, bytes)) or not isinstance(filenames, Sequence):
        raise TypeError(f"checkpoint_filenames is a list of str, not {type(filenames).__name__}")
    for name in filenames:
        if not isinstance(name, str):
            raise TypeError(f"checkpoint_filenames is a list of str, and has {name!r}")
    if not filenames:
        raise ValueError("checkpoint_filenames is empty")
    return str(Path(filenames[0]).with_name(MANIFEST) if strategy is None else strategy)


def _existing(strategy: str) -> Path:
    path = Path(strategy)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint: {path} does not exist")
    return path


def _given_files(strategy: Path, filenames: Sequence[str]) -> Manifest:
    found = manifest.read(strategy)
    if len(filenames) != len(found.files):
        raise ValueError(
            f"{len(filenames)} files are given, and {strategy} is of a job with "
            f"{len(found.files)} ranks"
        )
    return replace(found, files=tuple(map(Path, filenames)))


def _consolidate(source: Folder, target: Folder) -> None:
    safetensors()

    def read(opened: Opened) -> tuple[Manifest, dict[str, Array]]:
        found = manifest.read(opened.path)
        arrays = {}
        with Reader(found) as reader:
            for name, record in found.tensors.items():
                arrays[name] = reader.read(name, tuple((0, length) for length in record.shape))
        return found, arrays

    what = f"consolidation of {source.path}"
    found, arrays = alone(what, lambda: source.existing() / MANIFEST, read)
    saving.write_alone(target, arrays, found.values, found.keys)


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
