"""What an allreduce takes on more hosts than there are here, by a model of the data plane.

    python benchmarks/cost_model.py                              # predictions
    python benchmarks/cost_model.py --check slow.json fast.json  # against files of hosts.py

The model and its assumptions are described in docs/scaling.md. To check it, measure one size over a
slow link and over one that is no limit (hosts.py --sizes '64 MiB' --transports tcp --entries
'hvdlite ring' 'hvdlite hierarchical' --ranks-per-host 2 --gbit 1 --json slow.json, and the same
with --gbit 0 --json fast.json): what the second takes is the work of the ranks.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from measuring import duration, make_parser, table, write

from hvdlite.common.collectives.costs import COSTS, Model

MIB = 1 << 20
WIRE_SHARE = 1448 / 1514  # of an Ethernet frame, what is not a header
CHECKED_HOSTS = 2  # Of hosts.py.
ENTRIES = {"hvdlite ring": "ring", "hvdlite hierarchical": "hierarchical"}


@dataclass(frozen=True)
class Machines:
    """Hosts that are all alike, each with one link, which carries as much in as out at once."""

    hosts: int
    ranks_per_host: int
    gbit: float  # of a link, a second, each way
    latency_seconds: float  # of the wire, one way
    step_seconds: float  # what a message costs the ranks in software
    far: float  # how many times as long a byte takes to hosts half way around
    memory_bytes: float  # of a tensor, a second, that one half of the work in a host takes in

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.hosts * self.ranks_per_host

    @property
    def model(self) -> Model:
        """The figures between the hosts; what is not given is the default."""
        if math.isinf(self.memory_bytes):  # Only steps and the wire are asked for.
            nothing = Model(*[0.0] * len(Model.names()))
            byte = 1 / self.link_bytes
            return replace(nothing, byte=byte, far_byte=byte, message=self.latency_seconds)
        return Model(
            message=self.latency_seconds + self.step_seconds,
            byte=1 / self.link_bytes,
            far_byte=self.far / self.link_bytes,
        )

    @property
    def link_bytes(self) -> float:
        """A second, each way, without headers."""
        return self.gbit * 1e9 / 8 * WIRE_SHARE


@dataclass(frozen=True)
class Cost:
    """Where the time of an allreduce goes, in seconds."""

    steps: float
    wire: float
    work: float

    @property
    def seconds(self) -> float:
        """Together: the ranks work on pieces while the wire carries others."""
        return self.steps + max(self.wire, self.work)


def ring(machines: Machines, size: float) -> Cost:
    """One ring through all ranks. Each host's border is crossed once each way."""
    n = machines.ranks
    steps, share = 2 * (n - 1), 2 * (n - 1) / n
    crossing = machines.latency_seconds * machines.hosts / n if machines.hosts > 1 else 0
    return Cost(
        steps * (machines.step_seconds + crossing),
        share * size / machines.link_bytes if machines.hosts > 1 else 0,
        share * size / machines.memory_bytes,
    )


def between(name: str, machines: Machines, size: float) -> Cost:
    """Shared memory inside the hosts; between them an algorithm for each local rank at a time."""
    cost = COSTS[name](machines.model, machines.hosts, machines.ranks_per_host, size)
    if machines.hosts == 1:
        return Cost(0, 0, 2 * size / machines.memory_bytes)
    return Cost(cost.steps, cost.wire, cost.work + 2 * size / machines.memory_bytes)


WAYS: dict[str, Callable[[Machines, float], Cost]] = {
    "ring": ring,
    "hierarchical": partial(between, "ring"),
    **{name: partial(between, name) for name in COSTS if name != "ring"},
}


def predict(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds of all ways, for all links and numbers of ranks."""
    records: list[dict[str, Any]] = []
    for gbit in args.gbit:
        for ranks in args.ranks:
            machines = Machines(
                max(1, ranks // args.ranks_per_host),
                min(ranks, args.ranks_per_host),
                gbit,
                args.latency_us * 1e-6,
                args.step_us * 1e-6,
                args.far,
                args.memory_gbytes * 1e9,
            )
            for name, way in WAYS.items():
                cost = way(machines, args.mib * MIB)
                known = {"gbit": gbit, "ranks": ranks, "hosts": machines.hosts, "way": name}
                records.append({**known, **asdict(cost), "seconds": cost.seconds})
    return records


def print_predictions(records: list[dict[str, Any]]) -> None:
    """One line for each link and number of ranks."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for record in records:
        key = (f"{record['gbit']:g} Gbit/s", f"{record['ranks']:,}", f"{record['hosts']:,}")
        rows.setdefault(key, []).append(duration(record["seconds"]))
    lines = [[*key, *cells] for key, cells in rows.items()]
    print(table(["link", "ranks", "hosts", *WAYS], lines))


# -- against what was measured


def medians(path: Path) -> tuple[Mapping[str, float], dict[str, float]]:
    """Read a file of hosts.py; return its link, and the seconds of each entry.

    Ends the program where the file has several sizes or transports.
    """
    records = json.loads(path.read_text())["records"]
    cases = {(each["transport"], each["what"]) for each in records}
    if len(cases) > 1:
        raise SystemExit(f"{path} must have one size over one transport, and has {sorted(cases)}")
    return records[0], {each["entry"]: each["seconds"]["median"] for each in records}


def check(slow: Path, fast: Path) -> list[dict[str, Any]]:
    """Model and measurement, for each entry that both files have."""
    link, measured = medians(slow)
    _, work = medians(fast)
    machines = Machines(
        CHECKED_HOSTS, link["ranks_per_host"], link["gbit"], link["delay_ms"] / 1e3, 0, 1, math.inf
    )
    records: list[dict[str, Any]] = []
    for entry, name in ENTRIES.items():
        if entry in measured and entry in work:
            wire = WAYS[name](machines, link["mib"] * MIB)
            cost = Cost(wire.steps, wire.wire, work[entry])
            known = {"entry": entry, "gbit": link["gbit"], "measured": measured[entry]}
            records.append({**known, **asdict(cost), "seconds": cost.seconds})
    return records


def print_check(records: list[dict[str, Any]]) -> None:
    """Model beside measurement."""
    lines = []
    for record in records:
        columns = ("wire", "work", "seconds", "measured")
        cells = [duration(record[column]) for column in columns]
        ratio = f"{record['measured'] / record['seconds']:.2f}"
        lines.append([record["entry"], f"{record['gbit']:g} Gbit/s", *cells, ratio])
    print(table(["", "link", "wire", "work", "model", "measured", "measured / model"], lines))


def main() -> None:
    parser = make_parser("A model of the allreduce.", "cost_model", [8, 64, 512, 4096, 16384])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--mib", type=float, default=97.5, help="size of the tensor")
    parser.add_argument("--gbit", type=float, nargs="+", default=[10, 100], help="each way")
    parser.add_argument("--latency-us", type=float, default=30, help="of the wire, one way")
    parser.add_argument("--step-us", type=float, default=200, help="software, for each message")
    parser.add_argument("--far", type=float, default=1.25, help="times as long as near, for a byte")
    parser.add_argument("--memory-gbytes", type=float, default=20, help="a second, inside a host")
    parser.add_argument("--check", type=Path, nargs=2, metavar=("SLOW", "FAST"))
    args = parser.parse_args()
    if args.check:
        records = check(*args.check)
        print_check(records)
    else:
        records = predict(args)
        print_predictions(records)
    write(args.json, records)


if __name__ == "__main__":
    main()
