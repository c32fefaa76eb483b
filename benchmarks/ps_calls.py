"""Calls of a parameter server beside gloo and torch RPC: see `parameter_server.py`.

python benchmarks/ps_calls.py WAY FILE   # one process of a job; it writes what it saw as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jobs import environment, hvdlite_run, in_turns, run_command
from ps_cluster import WARM_STEPS, Rows, spread_of
from torch.distributed import rpc

SERVER, GLOO, RPC = "server", "gloo", "rpc"
SMALL, TABLES = 1024, 1000  # Elements of 4 KiB; how many of them make a step.
ROWS, LENGTH, ASKED = 1_000_000, 64, 10_000
WHAT = {
    "small": "4 KiB pushed and pulled",
    "tables": "1,000 tables of 4 KiB pushed and pulled",
    "rows": "10,000 rows of 1,000,000 x 64 pulled and pushed",
}
Calls = dict[str, Callable[[], object]]
KEPT: dict[str, torch.Tensor] = {}  # Of the process that keeps things for gloo and RPC.


def measure_calls(args: argparse.Namespace) -> Rows:
    """See the top of `parameter_server.py`."""
    ways = {way: partial(_seconds, way, args.steps) for way in (SERVER, GLOO, RPC)}
    found = in_turns(ways, args.rounds)
    return [
        (f"{text}, {way}", spread_of([each for job in found[way] for each in job[name]]))
        for name, text in WHAT.items()
        for way in ways
    ]


def _seconds(way: str, steps: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        flags = ["--ps-servers", "1", "--ps-workers", "independent"] if way == SERVER else []
        words = [str(Path(__file__)), way, str(file), str(steps)]
        command = [*hvdlite_run(1 if flags else 2), *flags, sys.executable, *words]
        # Others find each other by a file: RPC and gloo need no port of their own then.
        run_command(command, folder, {**environment(), "MEETING": f"file://{folder}/meeting"})
        found: dict[str, list[float]] = json.loads(file.read_text())
    return found


def _of_server() -> Calls:
    from hvdlite.numpy import ps

    ps.init()
    small, names = np.ones(SMALL, np.float32), [f"t{number}" for number in range(TABLES)]
    ids = np.random.default_rng(1).choice(ROWS, ASKED, replace=False)
    rows = np.ones((ASKED, LENGTH), np.float32)
    for name in ["small", *names]:
        ps.start(name, small)
    ps.start_rows("rows", ROWS, LENGTH)

    def push_and_pull() -> None:
        ps.push_async("small", small)
        ps.pull("small")

    def push_and_pull_all() -> None:
        handles = [ps.push_async(name, small) for name in names]
        handles += [ps.pull_async(name) for name in names]
        for handle in handles:
            ps.synchronize(handle)

    def pull_and_push_rows() -> None:
        ps.pull_rows("rows", ids)
        ps.push_rows("rows", ids, rows)

    return {"small": push_and_pull, "tables": push_and_pull_all, "rows": pull_and_push_rows}


def _keep() -> None:
    KEPT["small"] = torch.zeros(SMALL)
    KEPT["tables"] = torch.zeros(TABLES, SMALL)
    KEPT["rows"] = torch.zeros(ROWS, LENGTH)


def _of_gloo(rank: int, counts: dict[str, int]) -> Calls:
    dist.init_process_group("gloo", os.environ["MEETING"], rank=rank, world_size=2)
    other, mine = 1 - rank, rank == 0
    small, many = torch.ones(SMALL), torch.ones(TABLES, SMALL)
    ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:ASKED]
    rows = torch.ones(ASKED, LENGTH)

    def ask_small() -> None:
        dist.send(small, other)
        dist.recv(small, other)

    def ask_many() -> None:
        sent = [dist.isend(each, other) for each in many]
        for work in [*sent, *[dist.irecv(each, other) for each in many]]:
            work.wait()

    def ask_rows() -> None:
        dist.send(ids, other)
        dist.recv(rows, other)
        dist.send(ids, other)
        dist.send(rows, other)

    if mine:
        return {"small": ask_small, "tables": ask_many, "rows": ask_rows}
    _keep()
    for _ in range(counts["small"]):
        dist.recv(small, other)
        KEPT["small"] += small
        dist.send(KEPT["small"], other)
    for _ in range(counts["tables"]):
        for work in [dist.irecv(each, other) for each in many]:
            work.wait()
        KEPT["tables"] += many
        for work in [dist.isend(each, other) for each in KEPT["tables"]]:
            work.wait()
    for _ in range(counts["rows"]):
        dist.recv(ids, other)
        dist.send(KEPT["rows"][ids], other)
        dist.recv(ids, other)
        dist.recv(rows, other)
        KEPT["rows"].index_add_(0, ids, rows)
    return {}


def _add(name: str, number: int, tensor: torch.Tensor) -> torch.Tensor:
    KEPT[name][number] += tensor
    return KEPT[name][number]


def _take_rows(ids: torch.Tensor) -> torch.Tensor:
    return KEPT["rows"][ids]


def _add_rows(ids: torch.Tensor, rows: torch.Tensor) -> None:
    KEPT["rows"].index_add_(0, ids, rows)


def _of_rpc(rank: int) -> Calls:
    _keep()
    options = rpc.TensorPipeRpcBackendOptions(init_method=os.environ["MEETING"])
    rpc.init_rpc(str(rank), rank=rank, world_size=2, rpc_backend_options=options)
    small, rows = torch.ones(SMALL), torch.ones(ASKED, LENGTH)
    ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:ASKED]

    def ask_many() -> None:
        for future in [rpc.rpc_async("1", _add, ("tables", n, small)) for n in range(TABLES)]:
            future.wait()

    def ask_rows() -> None:
        rpc.rpc_sync("1", _take_rows, (ids,))
        rpc.rpc_sync("1", _add_rows, (ids, rows))

    one = partial(rpc.rpc_sync, "1", _add, ("tables", 0, small))
    return {"small": one, "tables": ask_many, "rows": ask_rows} if rank == 0 else {}


def main(way: str, file: str, steps: int) -> None:
    """Be a process of a job; the one that asks measures."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("HVDLITE_RANK", "0"))
    counts = {"small": 20 * steps, "tables": steps, "rows": steps}
    calls: Calls
    if way == SERVER:
        calls = _of_server()
    elif way == GLOO:
        calls = _of_gloo(rank, counts)
    else:
        calls = _of_rpc(rank)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        found[name] = []
        for _ in range(counts[name]):
            begin = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - begin)
        del found[name][:WARM_STEPS]
    if found:
        Path(file).write_text(json.dumps(found))
    if way == RPC:
        rpc.shutdown()
    elif way == SERVER:
        from hvdlite.numpy import ps

        ps.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
