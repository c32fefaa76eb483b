"""Datasets of `tf.data` for the ranks of a job: divided among them, or made by other processes.

dataset = hvdlite.tf.data.shard(dataset, "drop").shuffle(10_000).batch(32)

`hvdlite.tf.data.compute_service` is imported by those who use it.
"""

from __future__ import annotations

from hvdlite.tf.data.sharding import Remainder, shard

__all__ = ["Remainder", "shard"]
