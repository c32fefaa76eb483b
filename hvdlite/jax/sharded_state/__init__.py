"""``DistributedOptimizer(..., shard_state=True)``: each rank has a part of the optimizer's state.

gradients -> reducescatter -> the optimizer's update of this rank's part of each -> allgather of
the updates. The optimizer sees a pytree of the same structure, with a `Shard` for each array.

elementwise.py  which transformations can update parts of arrays
shards.py       the part of an array that is this rank's: cut, gathered
optimizer.py    the exchange around a transformation
"""

from __future__ import annotations
