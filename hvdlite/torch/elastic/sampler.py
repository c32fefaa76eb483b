"""A sampler that knows which samples of an epoch are done, and shares the rest anew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from torch.utils.data import Sampler

from hvdlite.common.runtime.basics import rank, size


class ElasticSampler(Sampler[int]):
    """Shares the indices of `dataset` among all ranks; after a reset, those that are left.

    Give it to a `TorchState`, call `record_batch` after each batch and `set_epoch` at the end of
    each epoch. If all ranks commit at the same points, every index is used exactly once in an
    epoch, except for at most ``size() - 1`` at the end of a partition that are used twice, so that
    all ranks have equally many. `shuffle` and `seed` (and the epoch) give the order.

    Raises `ValueError` before `init`.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        # How many indices of the epoch are done, on all ranks together.
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        # How many of this rank's indices were recorded since the last iteration has begun.
        self._recorded = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, with all indices; call it at the end of the one before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has used `batch_size` more indices; `batch_idx` has no effect.

        The last batch counts with its real size. The ranks share anew at the next reset.
        """
        done = min(batch_size, self.num_samples - self._recorded)
        self._recorded += done
        self.processed_num += done * self.num_replicas

    def reset(self) -> None:
        """Share what is left of the epoch among the ranks that there are now."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self._recorded = 0

    def state_dict(self) -> dict[str, int]:
        """Return how far the epoch is."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's share: `len` indices."""
        self._recorded = 0
        # Few indices that are left may have to be repeated more than once.
        padded = islice(cycle(self.remaining_indices), self.total_size)
        return islice(padded, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples


__all__ = ["ElasticSampler"]
