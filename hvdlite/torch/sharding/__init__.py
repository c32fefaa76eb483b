"""Sharded operators: part of a model is cut among ranks by strategies.

from hvdlite.torch import sharding

hvd.init_process_group()
block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
sharding.set_strategy(block[0], ((2, 1), (1, 4)))
sharded = sharding.shard(block, example=batch)
output = sharded(batch)  # of this rank, as everywhere in a data-parallel model

    meshes          device meshes over hvdlite, layouts and placements on them, and how DTensor
                    cuts a tensor along another dimension
    rules           how each operator of torch may be cut, and what runs on parts
    planning        the operators of a module, and strategies for all of them
    graph           the planned part as a graph on local tensors
    sharded_module  what `shard` returns
    runner          its calls: plans for new shapes, and the check that ranks do alike
    collectives     what ranks exchange
    shares          a rank's share of the batch, at both ends of the part
    leaves          what a rank holds of parameters, in each call
    distribution    parameters that become DTensors
    steps           an optimizer's step over local tensors
    dtensor         DTensors, where each version of torch has them
"""

from __future__ import annotations

from hvdlite.torch.sharding.meshes import layout, mesh, placements
from hvdlite.torch.sharding.planning.planner import plan, set_strategy
from hvdlite.torch.sharding.planning.plans import Plan, Planned
from hvdlite.torch.sharding.sharded_module import shard
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
