"""States with DTensors: written and read by PyTorch's distributed checkpoints (DCP).

DCP's own description of a checkpoint, `.metadata`, is a pickle, and so are values that are no
tensors: load only checkpoints that you trust.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from hvdlite.checkpoint import keys, loading, saving, trees
from hvdlite.checkpoint.job import check_same, place, together
from hvdlite.checkpoint.loading import Options
from hvdlite.checkpoint.manifest import (
    DCP_METADATA,
    Folder,
    Keys,
    Manifest,
    Record,
    keys_of_json,
    keys_to_json,
)
from hvdlite.checkpoint.opened import Opened, alone, on_all_ranks
from hvdlite.checkpoint.tensors import Part, Tensors, kinds_of
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.layouts.layout import whole
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.torch.checkpoint.dcp_files import Reader, Writer, load_planner
from hvdlite.torch.checkpoint.tensors import TorchTensors, is_dtensor, local
from hvdlite.torch.dtypes import DTYPE_NAMES, as_tensor

_KEYS = "hvdlite.keys"  # in the `planner_data` of the description: see `Manifest.keys`


class _ShapesOnly(TorchTensors):
    """Leaves to DCP which part of a DTensor this rank holds, however it is placed."""

    def part(self, tensor: Any) -> Part | None:
        """Return the shape of a DTensor, with the local shape for its part."""
        if not is_dtensor(tensor):
            return None
        box = tuple((0, length) for length in local(tensor).shape)
        return Part(tuple(tensor.shape), box)


def save(folder: Folder, state: Any, layouts: Mapping[str, Any] | None, tensors: Tensors) -> None:
    """Write a state with DTensors; each of them says itself how it is cut."""
    what = f"save of {folder.path}"
    rank = place()[0]
    flat: dict[str, Any] = {}

    def prepare() -> dict[str, Keys]:
        _check(layouts)
        tree = trees.expand(state, tensors, None)
        for name, _ in trees.of_owners(tree, lambda owner: owner.layouts):
            raise ValueError(
                f"{name!r} is another one on each rank, which a state with DTensors cannot have: "
                "save this optimizer on its own"
            )
        entries, keys_of_entries = keys.to_save(tree, tensors)
        flat.update(entries)
        for name, (dtype, _) in kinds_of(flat, tensors).items():
            flat[name] = _of_torch(flat[name], dtype)
        if rank == 0:
            folder.prepare()
        return keys_of_entries

    def write() -> None:
        planner = _SavePlanner(written)
        state_dict_saver.save(flat, storage_writer=Writer(folder.new), planner=planner)

    try:
        # Ranks may hold different entries, and rank 0 describes all of them.
        of_ranks = together(what, prepare)
        saving.check_shared(what, folder)
        written = keys_to_json({name: path for each in of_ranks for name, path in each.items()})
        together(what, lambda: _unwrapped(what, write))
        together(what, lambda: folder.commit() if rank == 0 else None)
    except BaseException:
        if rank == 0:
            folder.discard()
        raise


def _of_torch(tensor: Any, dtype: str) -> torch.Tensor:
    """Return a tensor for DCP, which would write arrays of numpy as values."""
    if isinstance(tensor, torch.Tensor):
        return tensor
    return as_tensor(np.asarray(tensor).astype(numpy_dtype(dtype)))


class _SavePlanner(DefaultSavePlanner):
    """Writes the keys of entries to the place where DCP has such things of its own."""

    def __init__(self, written: Mapping[str, Any]) -> None:
        # The names are final: DCP would take lists of values apart, and leave out empty dicts.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._written = written

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        if self._written:
            metadata = dataclasses.replace(metadata, planner_data={_KEYS: self._written})
        return plans, metadata


def load(
    folder: Folder,
    state: Any,
    layouts: Mapping[str, Any] | None,
    tensors: Tensors,
    options: Options,
) -> Any:
    """Give a state the values of a checkpoint of DCP, each rank the parts of its DTensors."""
    what = f"load of {folder.path}"
    rank, ranks = place()
    plans: list[tuple[loading.Plan, Reader, dict[str, Any]]] = []

    def prepare(opened: Opened) -> bytes:
        _check(layouts)
        reader = opened.files.enter_context(Reader(opened.path.parent))
        found = _manifest(reader.described())
        shapes = _ShapesOnly()
        shapes.whole = tensors.whole
        plan = loading.plan_of(found, state, None, shapes, options, rank, ranks)
        flat = {
            name: _of_torch(wanted.tensor, wanted.dtype) for name, wanted in plan.tensors.items()
        }
        flat.update(plan.values)
        reader.open_files(flat)
        plans[:] = [(plan, reader, flat)]
        return repr(sorted(plan.facts.items())).encode()

    with on_all_ranks(what, lambda: folder.existing() / DCP_METADATA, prepare) as digests:
        plan, reader, flat = plans[0]
        check_same(what, plan.facts, digests)
        is_alone = not dist.is_initialized()
        together(what, lambda: _unwrapped(what, lambda: _load(reader, flat, is_alone)))
    for name, wanted in plan.tensors.items():
        if flat[name] is not wanted.tensor:
            flat[name] = tensors.store(wanted.tensor, tensors.array(flat[name]))
    return trees.fill(state, plan.tree, flat, tensors)


def _load(reader: Reader, flat: dict[str, Any], is_alone: bool) -> None:
    # The public load() of older versions takes part in a group that there is, also for one rank.
    with warnings.catch_warnings():
        # They warn of the pickle of values, too, which docs/checkpoints.md tells.
        warnings.filterwarnings("ignore", "You are using `torch.load`", FutureWarning)
        state_dict_loader._load_state_dict(flat, reader, no_dist=is_alone, planner=load_planner())


def consolidate(source: Folder, target: Folder, tensors: Tensors) -> None:
    """Write a checkpoint of DCP as one file of safetensors; rank 0 does it."""
    together(
        f"consolidation of {source.path}",
        lambda: _consolidate(source, target, tensors) if place()[0] == 0 else None,
    )


def _consolidate(source: Folder, target: Folder, tensors: Tensors) -> None:
    what = f"consolidation of {source.path}"

    def read(opened: Opened) -> tuple[Metadata, dict[str, Any]]:
        reader = opened.files.enter_context(Reader(opened.path.parent))
        metadata = reader.described()
        flat: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for name, entry in metadata.state_dict_metadata.items()
        }
        _unwrapped(what, lambda: _load(reader, flat, True))
        return metadata, flat

    metadata, flat = alone(what, lambda: source.existing() / DCP_METADATA, read)
    arrays = {name: tensors.array(leaf) for name, leaf in flat.items() if tensors.is_tensor(leaf)}
    values = {name: leaf for name, leaf in flat.items() if name not in arrays}
    for name, value in values.items():
        trees.check_value(value, name)
    saving.write_alone(target, arrays, values, _manifest(metadata).keys)


def _manifest(metadata: Metadata) -> Manifest:
    """Return what a checkpoint holds, for the checks of names, shapes and dtypes."""
    records: dict[str, Record] = {}
    values: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = DTYPE_NAMES.get(entry.properties.dtype, str(entry.properties.dtype))
            records[name] = Record(whole(len(entry.size)), tuple(entry.size), dtype)
        else:
            values[name] = None
    return Manifest((), records, values, keys_of_json((metadata.planner_data or {}).get(_KEYS, {})))


def _check(layouts: Mapping[str, Any] | None) -> None:
    """Raise `ValueError` for layouts, and unless hvdlite and torch.distributed have alike ranks."""
    ranks = place()[1]
    group = dist.get_world_size() if dist.is_initialized() else 1
    if dist.is_initialized() and group != ranks:
        raise ValueError(
            f"torch.distributed has {group} ranks, and hvdlite {ranks}: call "
            "hvd.init_process_group()"
        )
    if layouts:
        raise ValueError(
            "layouts are for plain tensors, and DTensors say themselves how they are cut: leave "
            "layouts out, or call hvd.checkpoint.consolidate() on a checkpoint of DTensors first"
        )


def _unwrapped(what: str, work: Callable[[], Any]) -> None:
    """Run a call of DCP; raise what went wrong on this rank instead of a `CheckpointException`."""
    try:
        work()
    except CheckpointException as error:
        rank = place()[0]
        failures = {at: failure[0] for at, failure in error.failures.items()}
        at = rank if rank in failures else min(failures)
        cause = failures[at]
        if at != rank:
            raise HorovodInternalError(
                f"{what}: rank {at} failed: {type(cause).__name__}: {cause}", at, job_goes_on=True
            ) from None
        if isinstance(cause, (OSError, ValueError, KeyError, TypeError, MemoryError)):
            raise cause  # noqa: B904 - it has causes of its own
        raise ValueError(f"{what}: {type(cause).__name__}: {cause}") from cause
