"""Slices of batches: the part of each input that this rank takes, for arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.data.strategies import (
    DATA_PARALLEL,
    Cuts,
    Part,
    Patches,
    Shape,
    Strategy,
    parse,
    parse_patches,
    plan,
    plan_patches,
)

IMAGE_DIMS = (-2, -1)  # height and width, of images with channels first


class Slicer(NamedTuple):
    """What is cut how, checked; and the ranks among which it is divided."""

    strategy: Strategy
    patches: Patches | None
    mesh: Any

    @classmethod
    def of(
        cls, strategy: object, mesh: Any, patches: object, patch_dims: object = IMAGE_DIMS
    ) -> Slicer:
        """Parse the arguments of `slice_batch`."""
        parsed = parse(strategy)
        cut = None if patches is None else parse_patches(parsed, patches, patch_dims)
        return cls(parsed, cut, mesh)

    def plan(self, shapes: list[Shape]) -> list[tuple[Part, ...]]:
        """Return the parts of each input that this rank takes now."""
        rank, ranks = place(self.mesh)
        if self.patches is not None:
            return plan_patches(self.patches, shapes, ranks, rank)
        return plan(self.strategy, shapes, ranks, rank)


def slice_batch(
    batch: Any,
    strategy: str | Cuts = DATA_PARALLEL,
    mesh: Any = None,
    *,
    patches: tuple[int, int] | None = None,
    patch_dims: tuple[int, int] = IMAGE_DIMS,
) -> Any:
    """Return this rank's part of a batch that all ranks have alike.

    - `batch`: an array of numpy, torch or TensorFlow, or tuples, lists and dicts of them. These
      are the inputs, in order. The result has the same structure. Arrays of numpy and torch are
      views of the memory of the batch; inputs that are not cut are the same objects.
    - `strategy`: ``"data_parallel"`` cuts each input along its first dimension into as many parts
      as there are ranks, ``"full_batch"`` cuts nothing. A tuple has a tuple for each input, with
      the number of parts of each dimension, as ``((1, 1, 1, 8), (1,))`` for images that are cut
      along their width, and labels.
    - `mesh`: the ranks among which the batch is divided, in order: a `ProcessSet`, or a
      ``DeviceMesh`` of torch. None: all ranks of the job.
    - `patches`: cut images, which are the inputs of 3 and more dimensions, into so many rows and
      columns of patches, numbered row by row. All other inputs are whole. `strategy` has its
      default then.
    - `patch_dims`: where an image has its height and its width; ``(1, 2)`` for channels last.

    Rank r of N takes part ``r % parts``: where there are less parts than ranks they are repeated.

    Raises `TypeError` for a strategy of another type and for what is no array, `ValueError` for a
    strategy that is impossible or does not fit the batch or the ranks, and before `init`.
    """
    return apply(Slicer.of(strategy, mesh, patches, patch_dims), batch)


def apply(slicer: Slicer, batch: Any) -> Any:
    """Return this rank's part of a batch."""
    inputs: list[Any] = []
    rebuild = _flatten(batch, inputs)
    planned = slicer.plan([tuple(each.shape) for each in inputs])
    return rebuild(iter([_view(each, cut) for each, cut in zip(inputs, planned, strict=True)]))


def _view(array: Any, cut: tuple[Part, ...]) -> Any:
    if not cut:
        return array
    index = [slice(None)] * len(array.shape)
    for part in cut:
        index[part.dim] = slice(*part.bounds(array.shape[part.dim]))
    return array[tuple(index)]


def _flatten(batch: Any, inputs: list[Any]) -> Callable[[Iterator[Any]], Any]:
    """Append the arrays of a batch to `inputs`; return what puts others in their places."""
    if isinstance(batch, Mapping):
        values = [_flatten(each, inputs) for each in batch.values()]
        keys = list(batch)
        return lambda flat: dict(zip(keys, [each(flat) for each in values], strict=True))
    if isinstance(batch, (tuple, list)):
        parts = [_flatten(each, inputs) for each in batch]
        cls: Any = type(batch)
        make = cls._make if hasattr(cls, "_make") else cls  # a named tuple
        return lambda flat: make([each(flat) for each in parts])
    if not hasattr(batch, "shape") or not hasattr(batch, "__getitem__"):
        raise TypeError(
            f"a batch is made of arrays, in tuples, lists and dicts, and {batch!r} is "
            f"{type(batch).__name__}: convert it, or leave it out"
        )
    inputs.append(batch)
    return next


def place(mesh: Any = None) -> tuple[int, int]:
    """Return the position of this rank in `mesh`, and the number of its ranks.

    Raises `TypeError` for another type, and `ValueError` where this rank is not in it.
    """
    runtime = current()
    if mesh is None:
        return runtime.rank, runtime.topology.size
    if isinstance(mesh, ProcessSet):
        position = mesh.rank()
        if position is None:
            raise ValueError(f"{mesh} is not registered: give it to init() or add_process_set()")
        return position, mesh.size()
    if not hasattr(mesh, "mesh"):
        raise TypeError(
            f"mesh is a ProcessSet, a torch DeviceMesh or None, not {type(mesh).__name__} {mesh!r}"
        )
    ranks = ranks_of(mesh)
    if runtime.rank not in ranks:
        raise ValueError(f"rank {runtime.rank} is not in the mesh, which has the ranks {ranks}")
    return ranks.index(runtime.rank), len(ranks)


def ranks_of(mesh: Any) -> list[int]:
    """Return the global ranks of a ``DeviceMesh`` in its order."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


class Sliced:
    """The batches of a loader, of which this rank takes its part: see `slice_batch`.

    `loader` is iterable, any number of times, and gives all ranks the same batches in the same
    order; a sampler of `sampler_for` does so for a shuffled one. ``len()`` is that of the loader.
    The ranks are asked for with each batch, so that it is right after an elastic reset.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        strategy: str | Cuts = DATA_PARALLEL,
        mesh: Any = None,
        *,
        patches: tuple[int, int] | None = None,
        patch_dims: tuple[int, int] = IMAGE_DIMS,
    ) -> None:
        self.loader = loader
        self._slicer = Slicer.of(strategy, mesh, patches, patch_dims)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield apply(self._slicer, batch)


__all__ = ["Sliced", "slice_batch"]
