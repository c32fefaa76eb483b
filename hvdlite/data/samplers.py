"""Samplers: which samples a rank loads, by the strategy that cuts its batches."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np

from hvdlite.common.api.objects import allgather_object
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime.formed_sets import form_process_set, release_process_set
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.data.slicing import place, ranks_of
from hvdlite.data.strategies import DATA_PARALLEL, Cuts, parse


class SliceSampler:
    """Yields numbers of samples, for the ``sampler`` of a ``DataLoader`` of torch, or any other.

    Made by `sampler_for`, which tells what the arguments mean.
    """

    def __init__(
        self, samples: int, divided: bool, shuffle: bool, seed: int, mesh: Any = None
    ) -> None:
        self._samples, self._divided, self._shuffle = samples, divided, shuffle
        self._seed, self._mesh = seed, mesh
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently for each epoch; call it on all ranks with the same number."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples of this rank."""
        ranks = place(self._mesh)[1] if self._divided else 1
        return (self._samples + ranks - 1) // ranks

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self._samples)
        if self._shuffle:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(order)
        if self._divided:
            rank, ranks = place(self._mesh)
            order = np.resize(order, len(self) * ranks)[rank::ranks]
        return iter(order.tolist())


def sampler_for(
    strategy: str | Cuts,
    dataset: Sized,
    *,
    shuffle: bool = True,
    seed: int = 0,
    mesh: Any = None,
) -> SliceSampler:
    """Return the sampler of this rank, which fits `strategy`; blocks until all of `mesh` call this.

    With ``"data_parallel"`` each rank loads samples of its own, the same number on all: the first
    ones are loaded again where the number of ranks does not divide that of samples. Do not cut
    such batches again. With all other strategies all ranks load the same samples in the same
    order, and `slice_batch` or `Sliced` cuts the batches.

    - `dataset`: anything with a length, the number of samples.
    - `seed`: of the order, not negative; the order of an epoch depends on nothing else. Call
      `set_epoch` before each.
    - `mesh`: as in `slice_batch`; the samples are divided among these ranks, and no other one calls
      this for them. None is all ranks.

    These ranks compare seed, shuffling, strategy and the number of samples here, once: raises
    `HorovodInternalError` where they differ, which names two ranks and both values; `TypeError` and
    `ValueError` for a wrong strategy, seed or mesh, and before `init`.
    """
    parsed = parse(strategy)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed={seed!r} must be an int of 0 or more")
    place(mesh)  # It may be wrong, which is said before anything is sent.
    given = {"strategy": parsed, "seed": seed, "shuffle": bool(shuffle), "samples": len(dataset)}
    _compare(given, mesh)
    return SliceSampler(len(dataset), parsed == DATA_PARALLEL, bool(shuffle), seed, mesh)


def _compare(given: dict[str, Any], mesh: Any) -> None:
    """Raise `HorovodInternalError` unless all ranks of `mesh` have given the same."""
    formed = None
    if mesh is not None and not isinstance(mesh, ProcessSet):
        formed = form_process_set(ranks_of(mesh))  # Whichever other meshes there are.
    process_set = formed or mesh or global_process_set
    try:
        first, *others = allgather_object(given, "sampler_for", process_set)
        ranks = process_set.ranks or []
    finally:
        if formed is not None:
            release_process_set(formed)
    for rank, other in zip(ranks[1:], others, strict=False):
        for name, value in first.items():
            if other[name] != value:
                raise HorovodInternalError(
                    f"sampler_for: ranks disagree on {name}: rank {ranks[0]} has {value!r}, rank "
                    f"{rank} has {other[name]!r}. Give the same on all ranks",
                    job_goes_on=True,
                )


__all__ = ["SliceSampler", "sampler_for"]
