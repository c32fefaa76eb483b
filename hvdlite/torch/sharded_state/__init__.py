"""``DistributedOptimizer(..., shard_state=True)``: each rank has a part of the optimizer's state.

gradients -> one flat buffer for each group and dtype -> reducescatter -> the wrapped optimizer's
step on one flat shard -> allgather into the buffer that the parameters are views of

elementwise.py  which optimizers can step over shards
shards.py       flat buffers, and the part of each that is this rank's
exchange.py     the collectives, and the state of all shards: cut, gathered, saved
optimizer.py    the mixin of the wrapped optimizer
"""

from __future__ import annotations
