"""What a training step costs rank 0 to coordinate, in jobs that are far larger than this machine.

    python benchmarks/simulate_coordinator.py            # 8 to 65,536 ranks: 2 minutes, no MPI
    python benchmarks/simulate_coordinator.py --quick    # 10 s

The decision rooms are the real ones, and so are the messages, which are encoded and decoded as on
the wire; what carries them is left out. Every rank has the same tensors, which the response cache
knows. It reports them in several messages, in an order that differs from that of other ranks: a
tensor comes up to `JITTER` of a step earlier or later than on average. Time goes in rounds, as many
as a rank sends messages; a leader hears all below it and then passes on what is complete.

Rank 0 is simulated in full, with all that report to it, and so are the leaders on one path from it
to the deepest host. For what else is below them, only the outcome is drawn by lot: a message for
each round, with the tensors that the last of so many ranks reports in it. Rank 0 answers every
message by itself, as if no two had come together.

The segments of the step are those that rank 0 has ordered. What they take between the hosts is
computed by the model of `costs`, with its default figures, or those of --model: one segment after
the other, each by one algorithm, or by the algorithm that each tensor would choose ("auto").

"Flat" is the same job with every rank reporting to rank 0. It is simulated for up to
`--flat-most` ranks; figures for more, marked ~, are those of so many in proportion to the ranks.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
from measuring import Spread, duration, make_parser, parse, say, table, write

from hvdlite.common.base.bitsets import NumberSet
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.between_hosts.costs import (
    ALLREDUCE,
    COSTS,
    Model,
    cheapest,
    step_seconds,
)
from hvdlite.common.collectives.between_hosts.model_file import DEFAULT, chosen_model
from hvdlite.common.decisions.aggregator import Aggregator
from hvdlite.common.decisions.control_tree import ROOT, Tree
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.requests.messages import (
    Orders,
    Report,
    Reports,
    Request,
    Segment,
    decode,
    encode,
)
from hvdlite.common.settings.config import Config

RANKS = (8, 64, 512, 4096, 16384, 65536)
TENSORS = (200, 1000, 2000)
HOST = 8  # ranks of one host
TENSOR = (256, 100)  # of float32
TENSOR_BYTES = math.prod(TENSOR) * 4
JITTER = 0.1  # of a step
LEAST_STEPS = 5


@dataclass
class Traffic:
    """What one step was for rank 0."""

    cpu_seconds: float = 0
    leader_cpu_seconds: float = 0  # of the leader on the path that reports to rank 0
    messages_in: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    bytes_out: int = 0
    segments: int = 0
    ring_seconds: float = 0  # of all segments between the hosts, by algorithm
    trees_seconds: float = 0
    halving_seconds: float = 0
    doubling_seconds: float = 0
    auto_seconds: float = 0


class Below:
    """A rank, or all ranks below a leader, that report to a node as one."""

    def __init__(self, ranks: NumberSet) -> None:
        self._ranks = ranks

    def rounds(self, lot: np.random.Generator, tensors: int, rounds: int) -> list[Report]:
        """Return the report of every round."""
        # The latest of n that are equally likely anywhere in 0 to 1 is the nth root of one such.
        late = lot.random(tensors) ** (1 / len(self._ranks))
        when = np.arange(tensors) / tensors + JITTER * (2 * late - 1)
        turns = np.clip((when * rounds).astype(int), 0, rounds - 1)
        chosen = ((turns == turn).nonzero()[0].tolist() for turn in range(rounds))
        return [Report(0, self._ranks, tuple(bits)) for bits in chosen]


class Node:
    """Rank 0, or a leader on the path, with those that report to it and are not on the path."""

    def __init__(self, topology: Topology, rank: int, path: Sequence[int]) -> None:
        self.children = Tree(topology, rank).children
        below = [child for child in self.children if child not in path]
        self._below = [Below(NumberSet.of(Tree(topology, child).subtree)) for child in below]
        self._own = Below(NumberSet.of((rank,)))

    def draw(self, lot: np.random.Generator, tensors: int, rounds: int) -> None:
        """By lot, when the tensors of the next step are reported."""
        self.own = self._own.rounds(lot, tensors, rounds)
        self._drawn = [each.rounds(lot, tensors, rounds) for each in self._below]

    def messages(self, turn: int) -> list[bytes]:
        """Return the messages that come from below in a round."""
        reports = (drawn[turn] for drawn in self._drawn)
        return [encode(Reports((report,))) for report in reports if report.bits]


class Leader(Node):
    """A leader on the path."""

    def __init__(self, topology: Topology, rank: int, path: Sequence[int]) -> None:
        super().__init__(topology, rank, path)
        self._aggregator = Aggregator(topology.size, Tree(topology, rank).subtree)

    def pass_down(self, answers: Sequence[bytes]) -> list[bytes]:
        """Orders pass by; what it sends to each of its children."""
        passed = [decode(answer, ROOT) for answer in answers]
        for orders in passed:
            assert isinstance(orders, Orders)
            for order in orders.orders:
                self._aggregator.note(order)
        return [*map(encode, passed)]

    def pass_up(self, turn: int, messages: Sequence[bytes]) -> list[bytes]:
        """Return the messages that it sends up in a round in which `messages` came."""
        for report in (self.own[turn], *reports_in(messages)):
            self._aggregator.receive(report, 0.0)
        reports = self._aggregator.pop_reports()
        return [encode(Reports(reports))] if reports else []


class Root(Node):
    """Rank 0."""

    def __init__(self, topology: Topology, path: Sequence[int], tensors: int) -> None:
        super().__init__(topology, ROOT, path)
        self._coordinator = Coordinator(
            topology.size,
            cache_capacity=2 * tensors,
            threshold_bytes=Config().fusion_threshold_bytes,
        )

    def first(self, ranks: int, tensors: int) -> bytes:
        """Run the first step, in which all ranks ask in full; return the orders."""
        names = (f"layer{number}.weight" for number in range(tensors))
        step = [Request(0, name, "allreduce", "float32", TENSOR, "cpu") for name in names]
        self._coordinator.receive(Report(0, range(ranks), (), tuple(step)), 0.0)
        return encode(Orders(self._coordinator.pop_orders()))

    def answer(self, turn: int, messages: Sequence[bytes]) -> list[bytes]:
        """Return what it sends to each child in a round in which `messages` came."""
        answers = []
        for report in (self.own[turn], *reports_in(messages)):
            self._coordinator.receive(report, 0.0)
            orders = self._coordinator.pop_orders()
            if orders:
                answers.append(encode(Orders(orders)))
        return answers


def reports_in(messages: Sequence[bytes]) -> Iterator[Report]:
    """Yield the reports in messages, each decoded when its turn comes."""
    for message in messages:
        decoded = decode(message, ROOT)
        assert isinstance(decoded, Reports)
        yield from decoded.reports


class Job:
    """A job after its first step, in which everything was negotiated."""

    def __init__(self, topology: Topology, tensors: int, rounds: int, model: Model) -> None:
        self._tensors, self._rounds = tensors, rounds
        self._hosts, self._model = len(topology.hosts), model
        path = [topology.hosts[-1][0]]
        while path[-1] != ROOT:
            path.append(Tree(topology, path[-1]).parent)
        self.depth = len(path) - (len(topology.hosts[-1]) == 1)
        self._leaders = [Leader(topology, rank, path) for rank in path[:-1]]
        self._root = Root(topology, path, tensors)
        answer = self._root.first(topology.size, tensors)
        for leader in self._leaders:
            leader.pass_down([answer])

    def step(self, lot: np.random.Generator) -> Traffic:
        """One training step."""
        for node in (*self._leaders, self._root):
            node.draw(lot, self._tensors, self._rounds)
        traffic, ordered = Traffic(), Counter[int]()
        for turn in range(self._rounds):
            messages = self._root.messages(turn) + self._up(turn, traffic)
            lot.shuffle(messages)  # type: ignore[arg-type]
            start = time.thread_time()
            answers = self._root.answer(turn, messages)
            traffic.cpu_seconds += time.thread_time() - start
            self._count(traffic, messages, answers)
            self._down(answers, traffic)
            for segment in segments_in(answers):
                ordered.update(segment)
                self._add_data_plane(traffic, len(segment))
        assert ordered == Counter(range(self._tensors)), "a tensor was lost, or came twice"
        return traffic

    def _up(self, turn: int, traffic: Traffic) -> list[bytes]:
        """Return what the last leader on the path sends to rank 0 in a round."""
        passed: list[bytes] = []
        for leader in self._leaders:  # the deepest first
            messages = leader.messages(turn) + passed
            start = time.thread_time()
            passed = leader.pass_up(turn, messages)
            if leader is self._leaders[-1]:
                traffic.leader_cpu_seconds += time.thread_time() - start
        return passed

    def _down(self, answers: Sequence[bytes], traffic: Traffic) -> None:
        for leader in self._leaders:
            start = time.thread_time()
            leader.pass_down(answers)
            if leader is self._leaders[-1]:
                traffic.leader_cpu_seconds += time.thread_time() - start

    def _count(self, traffic: Traffic, messages: list[bytes], answers: list[bytes]) -> None:
        children = len(self._root.children)
        traffic.messages_in += len(messages)
        traffic.bytes_in += sum(map(len, messages))
        traffic.messages_out += children * len(answers)
        traffic.bytes_out += children * sum(map(len, answers))

    def _add_data_plane(self, traffic: Traffic, tensors: int) -> None:
        """Add what a segment takes between the hosts."""
        traffic.segments += 1
        if self._hosts == 1:
            return
        auto = cheapest(self._model, self._hosts, HOST, TENSOR_BYTES)
        hosts = (HOST,) * self._hosts
        for name in COSTS[ALLREDUCE]:
            seconds = step_seconds(self._model, name, hosts, tensors * TENSOR_BYTES, tensors)
            for each in (name, *(["auto"] * (name == auto))):
                field = f"{each}_seconds"
                setattr(traffic, field, getattr(traffic, field) + seconds)


def segments_in(answers: Iterable[bytes]) -> Iterator[list[int]]:
    """Yield the tensors of each segment that answers order, by their bits."""
    for answer in answers:
        decoded = decode(answer, ROOT)
        assert isinstance(decoded, Orders)
        for order in decoded.orders:
            assert isinstance(order, Segment)
            yield [item for item in order.items if isinstance(item, int)]


# -- what is printed


def measure(topology: Topology, args: argparse.Namespace, tensors: int) -> dict[str, Any]:
    """Spread of the CPU time of rank 0, and means of everything else."""
    lot = np.random.default_rng([topology.size, tensors])
    job = Job(topology, tensors, args.messages, chosen_model(args.model))
    job.step(lot)
    end = time.perf_counter() + args.seconds
    steps = []
    while len(steps) < LEAST_STEPS or time.perf_counter() < end:
        steps.append(asdict(job.step(lot)))
    means = {name: fmean(step[name] for step in steps) for name in steps[0]}
    seconds = asdict(Spread.quartiles([step["cpu_seconds"] for step in steps]))
    return {"ranks": topology.size, "depth": job.depth, "seconds": seconds, **means}


def scaled(record: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the figures of a flat job in proportion to more ranks."""
    factor = ranks / record["ranks"]
    known = {"ranks": ranks, "depth": record["depth"], "estimated": True}
    seconds = {name: value * factor for name, value in record["seconds"].items()}
    counts = {n: v * factor for n, v in record.items() if n not in (*known, "seconds", "tensors")}
    return {**counts, **known, "seconds": seconds}


def both(args: argparse.Namespace, tensors: int) -> list[dict[str, Any]]:
    """Return the figures of all sizes, as a tree and flat."""
    records: list[dict[str, Any]] = []
    flat: dict[str, Any] = {}
    for ranks in args.ranks:
        say(f"{tensors} tensors, {ranks} ranks")
        hosts = tuple(tuple(range(r, min(r + HOST, ranks))) for r in range(0, ranks, HOST))
        records.append({"entry": "tree", **measure(Topology(hosts), args, tensors)})
        if flat.get("ranks") != min(ranks, args.flat_most):
            flat = measure(Topology.single_host(min(ranks, args.flat_most)), args, tensors)
        records.append(
            {"entry": "flat", **(flat if ranks == flat["ranks"] else scaled(flat, ranks))}
        )
    return [{"tensors": tensors, **record} for record in records]


def line(record: dict[str, Any]) -> list[str]:
    """One line of the table."""
    mark = "~" if record.get("estimated") else ""
    counts = [f"{mark}{record[name]:,.0f}" for name in ("messages_in", "messages_out")]
    kib = [f"{mark}{record[name] / 1024:,.1f}" for name in ("bytes_in", "bytes_out")]
    leader = record["leader_cpu_seconds"]
    return [
        f"{record['ranks']:,}",
        record["entry"],
        str(record["depth"]),
        counts[0],
        kib[0],
        counts[1],
        kib[1],
        mark + duration(record["seconds"]["median"]),
        duration(leader) if leader else "",
    ]


def data_plane_line(record: dict[str, Any]) -> list[str]:
    """One line of the table of the data plane."""
    names = [*COSTS[ALLREDUCE], "auto"]
    cells = [duration(record[f"{name}_seconds"]) for name in names]
    return [f"{record['ranks']:,}", f"{record['segments']:.0f}", *cells]


HEAD = ("ranks", "", "depth", "messages in", "KiB in", "messages out", "KiB out", "CPU of rank 0",
        "of its busiest leader")  # fmt: skip


def main() -> None:
    parser = make_parser("What a step costs rank 0 to coordinate.", "simulate_coordinator", RANKS)
    parser.add_argument("--tensors", type=int, nargs="+", default=TENSORS)
    parser.add_argument("--messages", type=int, default=10, help="of each rank, in a step")
    parser.add_argument("--flat-most", type=int, default=4096, help="ranks of a flat job")
    parser.add_argument("--model", default=DEFAULT, help="a file of hvdlite.bench")
    parser.add_argument("--seconds", type=float, default=1, help="to simulate each job, at least")
    few = {"ranks": RANKS[::2], "tensors": TENSORS[:2], "flat_most": 512, "seconds": 0}
    args = parse(parser, "few sizes, in less time", **few)
    records = []
    for tensors in args.tensors:
        records += both(args, tensors)
        print(f"\n{tensors} tensors, {args.messages} messages of each rank, in a step\n")
        chosen = [each for each in records if each["tensors"] == tensors]
        print(table(HEAD, map(line, chosen)))
        print("\nand between the hosts, by the model\n")
        layered = [each for each in chosen if each["entry"] == "tree" and each["ranks"] > HOST]
        print(
            table(["ranks", "segments", *COSTS[ALLREDUCE], "auto"], map(data_plane_line, layered))
        )
    print("\nanother collective between the hosts, by the model\n")
    write(args.json, records)


if __name__ == "__main__":
    main()
