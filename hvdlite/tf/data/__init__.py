"""Datasets of `tf.data` for the ranks of a job: divided, cut, or made by other processes.

dataset = hvdlite.tf.data.shard(dataset, "drop").shuffle(10_000).batch(32)
dataset = hvdlite.tf.data.slice(dataset.batch(8), ((1, 4, 1, 1), (1,)))  # a part of each image

`hvdlite.tf.data.compute_service` is imported by those who use it.
"""

from __future__ import annotations

from hvdlite.tf.data.sharding import Remainder, shard
from hvdlite.tf.data.slicing import slice

__all__ = ["Remainder", "shard", "slice"]
