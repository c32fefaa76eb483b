"""Sharded operators: part of a model is cut among ranks by strategies.

from hvdlite.torch import sharding

hvd.init_process_group()
block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
sharding.set_strategy(block[0], ((2, 1), (1, 4)))
sharded = sharding.shard(block, example=batch)
output = sharded(batch)  # of this rank, as everywhere in a data-parallel model

    meshes       device meshes over hvdlite, layouts and placements on them
    tracing      the operators of a module, from a run without values
    record       what that run leaves: operators, and calls of them
    rules        how each operator of torch may be cut
    plans        strategies for all of them, and what they cost
    lowering     the planned part as a graph on local tensors
    moves        a tensor from one layout to another, and its gradient back
    collectives  what ranks exchange for it
    pieces       operators that are another computation on a part
    running      what `shard` returns
    loading      whole tensors that are loaded into it
    steps        an optimizer's step over local tensors
    shares       a rank's share of the batch, at both ends of the part
    alltoalls    how DTensor cuts a tensor along another dimension
"""

from __future__ import annotations

from hvdlite.torch.sharding.meshes import layout, mesh, placements
from hvdlite.torch.sharding.plans import Plan, Planned, plan, set_strategy
from hvdlite.torch.sharding.running import shard
from hvdlite.torch.sharding.steps import local_step

__all__ = [
    "Plan",
    "Planned",
    "layout",
    "local_step",
    "mesh",
    "placements",
    "plan",
    "set_strategy",
    "shard",
]
