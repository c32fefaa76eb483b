"""Saves: each rank writes the parts that no lower rank has, and rank 0 puts the folder in place."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from hvdlite.checkpoint import compression, files, keys, manifest, trees
from hvdlite.checkpoint.job import check_same, place, together
from hvdlite.checkpoint.manifest import Folder, Keys, Manifest, Record
from hvdlite.checkpoint.tensors import Array, Tensors, kinds_of
from hvdlite.checkpoint.trees import given_layouts
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.layouts.layout import whole
from hvdlite.common.layouts.transfer import writers


@dataclass(frozen=True)
class Plan:
    """What a save writes: the description of all tensors, this rank's tensors, and the values.

    `keys` are those of the `Manifest`.
    """

    records: Mapping[str, Record]
    tensors: Mapping[str, Any]
    values: Mapping[str, Any]
    keys: Mapping[str, Keys]

    @property
    def facts(self) -> dict[str, str]:
        """What all ranks must agree about."""
        return {name: str(record) for name, record in self.records.items()}

    def digest(self) -> bytes:
        """Return what is equal on ranks that agree."""
        return hashlib.sha256(repr(sorted(self.facts.items())).encode()).digest()

    def without(self, names: Container[str]) -> Plan:
        """Return the same plan for all other tensors."""
        records = {name: each for name, each in self.records.items() if name not in names}
        tensors = {name: each for name, each in self.tensors.items() if name not in names}
        return Plan(records, tensors, self.values, self.keys)


def save(folder: Folder, state: Any, layouts: Mapping[str, Any] | None, tensors: Tensors) -> None:
    """Write a checkpoint of the state of all ranks to `folder`."""
    what = f"save of {folder.path}"
    rank, ranks = place()
    plans: list[Plan] = []

    def prepare() -> bytes:
        files.safetensors()
        plans.append(plan_of(state, layouts, tensors, ranks))
        if rank == 0:
            folder.prepare()
        return plans[0].digest()

    try:
        digests = together(what, prepare)
        check_shared(what, folder)
        if len(set(digests)) > 1:
            left_out = compression.uncommon(together(what, lambda: plans[0].facts))
            plans[0] = plans[0].without(left_out)
            digests = together(what, plans[0].digest)
        check_same(what, plans[0].facts, digests)
        names = [f"slices-{each:05d}-of-{ranks:05d}.safetensors" for each in range(ranks)]

        def write() -> tuple[int, dict[str, str]]:
            arrays = {
                name: tensors.array(plans[0].tensors[name])
                for name, record in plans[0].records.items()
                if rank in writers(record.layout, record.shape)
            }
            return files.write(folder.new / names[rank], arrays)

        written = together(what, write)
        together(what, lambda: finish(folder, plans[0], names, written) if rank == 0 else None)
    except BaseException:
        if rank == 0:
            folder.discard()
        raise


def check_shared(what: str, folder: Folder) -> None:
    """Raise `HorovodInternalError` on all ranks where one does not find the folder of rank 0."""
    found = together(what, lambda: (folder.new.is_dir(), str(folder.path)))
    for rank, (is_there, path) in enumerate(found):
        if not is_there:
            raise HorovodInternalError(
                f"{what}: rank {rank}, which saves to {path}, does not find the folder that rank 0 "
                f"has made for {found[0][1]}: all ranks must give the same folder, on a file "
                "system that all hosts share; threads must save in the same order on all ranks",
                rank,
                job_goes_on=True,
            )


def plan_of(state: Any, layouts: Mapping[str, Any] | None, tensors: Tensors, ranks: int) -> Plan:
    """Return what to write of a state. Raises `TypeError` and `ValueError` for what is wrong."""
    tree = trees.expand(state, tensors, None)
    entries, keys_of_entries = keys.to_save(tree, tensors)
    found = {name: each for name, each in entries.items() if tensors.is_tensor(each)}
    values = {name: each for name, each in entries.items() if name not in found}
    kinds = kinds_of(found, tensors)
    given = given_layouts(layouts, kinds, tree, ranks)
    records = {}
    for name, (dtype, shape) in kinds.items():
        layout = given.get(name) or whole(len(shape), ranks)
        try:
            records[name] = Record(layout, layout.full_shape(shape), dtype)
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from None
    return Plan(records, found, values, keys_of_entries)


def finish(
    folder: Folder, plan: Plan, names: list[str], written: list[tuple[int, dict[str, str]]]
) -> None:
    """Write layout.json, check that all files are there, and put the folder in place."""
    paths = tuple(folder.new / name for name in names)
    for rank, (path, (size, _)) in enumerate(zip(paths, written, strict=True)):
        if not path.is_file() or path.stat().st_size != size:
            raise FileNotFoundError(
                f"rank 0 does not see {path.name}, which rank {rank} has written to {path.parent}: "
                "a checkpoint must be in a folder that all hosts share"
            )
    digests: dict[str, dict[int, str]] = {name: {} for name in plan.records}
    for rank, (_, of_rank) in enumerate(written):
        for name, digest in of_rank.items():
            digests[name][rank] = digest
    records = {
        name: Record(record.layout, record.shape, record.dtype, digests[name])
        for name, record in plan.records.items()
    }
    manifest.write(Manifest(paths, records, plan.values, plan.keys), folder.new)
    folder.commit()


def write_alone(
    folder: Folder,
    arrays: Mapping[str, Array],
    values: Mapping[str, Any],
    keys_of_entries: Mapping[str, Keys],
) -> None:
    """Write whole tensors as a checkpoint of one rank, whose file is `model.safetensors`."""
    folder.prepare()
    try:
        path = folder.new / "model.safetensors"
        _, digests = files.write(path, arrays)
        records = {
            name: Record(whole(array.ndim), array.shape, array.dtype.name, {0: digests[name]})
            for name, array in arrays.items()
        }
        manifest.write(Manifest((path,), records, values, keys_of_entries), folder.new)
        folder.commit()
    except BaseException:
        folder.discard()
        raise
