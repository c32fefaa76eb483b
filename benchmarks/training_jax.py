"""How long whole training steps of JAX take: hvdlite, and jax.distributed.

    python benchmarks/training_jax.py                            # all networks, on 2 ranks
    python benchmarks/training_jax.py --quick                    # a minute
    python benchmarks/training_jax.py --networks wide --rounds 5

Needs the extra jax. Each entry trains in jobs of its own, which are launched in turns; every rank
computes with one thread. All train the same networks with the same optimizer on the same data:

- "floor": one program that makes the step without exchange, and a barrier;
- "jax.distributed": that program in `jax.shard_map` over the processes, whose gradients
  `jax.lax.pmean` averages by the collectives of gloo;
- "virtual devices": the same in one process, whose CPU XLA takes for as many devices as ranks;
- "hvdlite": that program with a `DistributedOptimizer`, whose gradients leave while XLA computes;
- "hvdlite after": one program computes the gradients, and the next one reduces them and steps;
- "hvdlite sharded": as "hvdlite", with a state of which each rank has its part (`shard_state`).

Prints a table (the median of the jobs, in brackets the least and the most of them), and writes all
figures to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jobs import Record, add_job_options, addresses, finish, run_jobs
from measuring import HVDLITE_RANKS, Ranks, Way, interleave, launched_rank, make_parser, parse
from training_table import print_training

FLOOR, DISTRIBUTED, VIRTUAL, OVERLAPPED = "floor", "jax.distributed", "virtual devices", "hvdlite"
AFTER, SHARDED = "hvdlite after", "hvdlite sharded"
OURS = [OVERLAPPED, AFTER, SHARDED]
ENTRIES = [FLOOR, DISTRIBUTED, VIRTUAL, *OURS]
WARM_STEPS = 3
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
Params = dict[str, Any]
Model = Callable[[Params, Any], Any]  # From parameters and inputs to logits.
Task = tuple[Model, Params, Any, Any]  # With the inputs and labels of a batch.


def gpt(blocks: int = 4, width: int = 128, context: int = 64, letters: int = 96) -> Task:
    """Return a transformer of the size of torch_gpt.py."""
    import jax
    import jax.numpy as jnp

    rng, heads = np.random.default_rng(1), 4
    params = {"embedding": weights(rng, letters, width), "out": weights(rng, width, letters)}
    for number in range(blocks):
        params[f"block {number}"] = {
            "heads": weights(rng, width, 3 * width),
            "join": weights(rng, width, width),
            "up": weights(rng, width, 4 * width),
            "down": weights(rng, 4 * width, width),
        }
    mask = np.tril(np.ones((context, context), bool))

    def attend(block: Params, hidden: Any) -> Any:
        parts = jnp.split(hidden @ block["heads"], 3, axis=-1)
        query, key, value = (each.reshape(*each.shape[:2], heads, -1) for each in parts)
        scores = jnp.einsum("bihc,bjhc->bhij", query, key) / (width // heads) ** 0.5
        shares = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        return jnp.einsum("bhij,bjhc->bihc", shares, value).reshape(hidden.shape) @ block["join"]

    def model(params: Params, codes: Any) -> Any:
        hidden = params["embedding"][codes]
        for number in range(blocks):
            block = params[f"block {number}"]
            hidden = hidden + attend(block, normed(hidden))
            hidden = hidden + jax.nn.gelu(normed(hidden) @ block["up"]) @ block["down"]
        return normed(hidden) @ params["out"]

    inputs, labels = rng.integers(letters, size=(2, 16, context)).astype(np.int32)
    return model, params, inputs, labels


def normed(hidden: Any) -> Any:
    """Return features with the mean 0 and the variance 1."""
    centred = hidden - hidden.mean(-1, keepdims=True)
    return centred / ((centred**2).mean(-1, keepdims=True) + 1e-5) ** 0.5


def wide(layers: int = 6, width: int = 2048, classes: int = 100) -> Task:
    """Return a network with much to send (97 MiB) and little to compute."""
    import jax

    rng = np.random.default_rng(1)
    params = {f"layer {number}": weights(rng, width, width) for number in range(layers)}
    params["out"] = weights(rng, width, classes)

    def model(params: Params, hidden: Any) -> Any:
        for number in range(layers):
            hidden = jax.nn.relu(hidden @ params[f"layer {number}"])
        return hidden @ params["out"]

    inputs = rng.normal(size=(16, width)).astype(np.float32)
    return model, params, inputs, rng.integers(classes, size=16).astype(np.int32)


def weights(rng: np.random.Generator, rows: int, columns: int) -> Any:
    """Return the weights of a layer, the same everywhere."""
    return (rng.normal(size=(rows, columns)) / rows**0.5).astype(np.float32)


NETWORKS: dict[str, Callable[[], Task]] = {"gpt": gpt, "wide": wide}


class DistributedRanks:
    """The ranks of a job that `jax.distributed` connects."""

    def __init__(self, meeting: Path, size: int) -> None:
        """Connect `size` ranks, which tell each other their addresses in files beside `meeting`."""
        import jax

        self.rank, self.size = launched_rank(), size
        address = addresses(meeting, self.rank, size)[0]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, size, self.rank)
        self.mesh = jax.make_mesh((size,), ("ranks",), (jax.sharding.AxisType.Auto,))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.largest([0.0])

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, element by element."""
        from jax.experimental.multihost_utils import process_allgather

        found = process_allgather(np.array(values, np.float32)).max(0)
        return [float(each) for each in found]

    def shared(self, values: Any, *dims: str) -> Any:
        """Return an array of all ranks, cut along `dims`, of which this rank has `values`."""
        import jax

        spec = jax.sharding.PartitionSpec(*dims)
        sharding = jax.sharding.NamedSharding(self.mesh, spec)
        return jax.make_array_from_process_local_data(sharding, values)


class VirtualRanks(DistributedRanks):
    """The devices that XLA makes of the CPU, as ranks. All get the batch of rank 0."""

    def __init__(self, size: int) -> None:
        import jax

        self.rank, self.size = 0, size
        self.mesh = jax.make_mesh((size,), ("ranks",), (jax.sharding.AxisType.Auto,))

    def largest(self, values: Sequence[float]) -> list[float]:
        return [*values]

    def shared(self, values: Any, *dims: str) -> Any:
        return super().shared(np.concatenate([values] * self.size) if dims else values, *dims)


def make_step(entry: str, task: Task, ranks: Ranks) -> tuple[Way, Callable[[], Params]]:
    """Return a function that makes one step, and one that returns the parameters."""
    import jax
    import jax.numpy as jnp
    import optax

    model, params, inputs, labels = task
    optimizer = optax.sgd(1e-3, momentum=0.9)
    if entry in OURS:
        import hvdlite.jax as hvd

        optimizer = hvd.DistributedOptimizer(optimizer, shard_state=entry == SHARDED)

    def gradients(params: Params, inputs: Any, labels: Any) -> Params:
        def loss(params: Params) -> Any:
            logits = model(params, inputs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        found: Params = jax.grad(loss)(params)
        return jax.lax.pmean(found, "ranks") if isinstance(ranks, DistributedRanks) else found

    def update(params: Params, state: Any, found: Params) -> tuple[Params, Any]:
        updates, state = optimizer.update(found, state, params)
        return optax.apply_updates(params, updates), state

    def step(params: Params, state: Any, inputs: Any, labels: Any) -> tuple[Params, Any]:
        return update(params, state, gradients(params, inputs, labels))

    compiled: Any = jax.jit(step, donate_argnums=(0, 1))
    batch = inputs, labels
    if isinstance(ranks, DistributedRanks):
        compiled = over_ranks(step, ranks)
        batch = ranks.shared(inputs, "ranks"), ranks.shared(labels, "ranks")
    elif entry == AFTER:
        first, second = jax.jit(gradients), jax.jit(update, donate_argnums=(0, 1))

        def compiled(params: Params, state: Any, *batch: Any) -> tuple[Params, Any]:
            found: tuple[Params, Any] = second(params, state, first(params, *batch))
            return found

    begun = jax.tree.map(np.asarray, (params, optimizer.init(params)))
    place = ranks.shared if isinstance(ranks, DistributedRanks) else jnp.array
    trained = [*jax.tree.map(place, begun)]

    def way() -> None:
        trained[:] = compiled(*trained, *batch)
        jax.block_until_ready(trained)
        if entry == FLOOR:
            ranks.barrier()

    return way, lambda: trained[0]


def over_ranks(step: Callable[..., Any], ranks: DistributedRanks) -> Any:
    """Return a step whose parameters are the same on all ranks, and its batches are their own."""
    import jax

    same, own = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("ranks")
    mapped = jax.shard_map(
        step, mesh=ranks.mesh, in_specs=(same, same, own, own), out_specs=same, check_vma=False
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank of a job; rank 0 writes the median step of each network."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    (entry,), (size,) = args.entries, args.ranks
    ranks: Ranks = HVDLITE_RANKS
    if entry == DISTRIBUTED:
        ranks = DistributedRanks(args.rank_file, size)
    elif entry == VIRTUAL:
        if launched_rank():
            return
        os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={size}"
        ranks = VirtualRanks(size)
    else:
        import hvdlite.jax as hvd

        hvd.init()
    records = [measure(entry, network, ranks, args.seconds) for network in args.networks]
    if ranks.rank == 0:
        args.rank_file.write_text(json.dumps(records))


def measure(entry: str, network: str, ranks: Ranks, seconds: float) -> Record:
    """Return the record of a network: the median step of the slowest rank."""
    model, params, inputs, labels = NETWORKS[network]()
    nbytes = sum(each.nbytes for each in leaves(params))
    order = np.random.default_rng(ranks.rank).permutation(len(inputs))  # Each has another one.
    step, trained = make_step(entry, (model, params, inputs[order], labels[order]), ranks)
    for _ in range(WARM_STEPS):
        step()
    (steps,) = interleave({entry: step}, seconds, ranks).values()
    if entry != FLOOR:
        check_same(entry, trained(), ranks)
    case = {"ranks": ranks.size, "network": network, "nbytes": nbytes, "entry": entry}
    return {**case, "seconds": median(steps), "steps": len(steps)}


def leaves(params: Params) -> list[Any]:
    """Return the arrays of a tree of parameters."""
    import jax

    found: list[Any] = jax.tree.leaves(params)
    return found


def check_same(entry: str, params: Params, ranks: Ranks) -> None:
    """Raise `ArithmeticError` when ranks that train together have come apart."""
    for number, each in enumerate(leaves(params)):
        mine = np.asarray(each).reshape(-1)[:16].astype(np.float64)
        if ranks.largest(mine.tolist()) != [-each for each in ranks.largest((-mine).tolist())]:
            raise ArithmeticError(f"{entry}: parameter {number} is not the same on all ranks")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("How long training steps of JAX take.", "training_jax", [2])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=ENTRIES, metavar="ENTRY")
    parser.add_argument("--seconds", type=float, default=3, help="of a job, for each network")
    add_job_options(parser)
    return parse(parser, "one job of each, half a second for each network", rounds=1, seconds=0.5)


def main() -> None:
    args = parse_arguments()
    if args.rank_file:
        rank_main(args)
        return
    records, left_out = run_jobs(__file__, args, sys.argv[1:])
    print_training(records, args.entries, FLOOR, DISTRIBUTED, *OURS, VIRTUAL)
    finish(args.json, records, left_out)


if __name__ == "__main__":
    main()
