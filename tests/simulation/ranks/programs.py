"""Random programs of collectives, and what numpy says that they give."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.plain.adapter import HOST_DEVICE
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.lists import split_rows
from hvdlite.common.plain.messages import NO_RANK, SMALLEST_PIECE, Request, Retune
from hvdlite.common.plain.process_set_table import GLOBAL_ID

Array = NDArray[Any]
COLLECTIVES = (
    "allreduce", "allreduce", "allgather", "allgather", "broadcast", "alltoall", "reducescatter",
    "grouped", "barrier",
)  # fmt: skip
ALLREDUCES = ("auto", "auto", "ring", "hierarchical", "trees", "halving", "doubling")
OPS = (ReduceOp.SUM, ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX)


class Tensor(Entry):
    """A tensor of a program on its way through the engine."""

    def __init__(self, request: Request, array: Array, splits: tuple[int, ...] = ()) -> None:
        super().__init__(request)
        self.splits = splits
        self.size_bytes = array.nbytes
        self.result: Array = np.empty(0)
        self._array = array.reshape(-1)

    @property
    def input(self) -> Array:
        return self._array

    def output(self, shape: tuple[int, ...]) -> Array:
        self.result = np.full(shape, 99, self._array.dtype)
        return self.result.reshape(-1)


@dataclass(frozen=True)
class Call:
    """One named collective, which members make once in each round."""

    name: str
    collective: str
    op: ReduceOp
    root: int  # By index in the set; one of the members that join last.
    columns: int
    seed: int
    odd: int | None = None  # The index of a member whose shape differs from those of others.

    def input(self, index: int, size: int, round_: int) -> Array:
        """Return small whole numbers; the rows of an allgather now and then change on one rank."""
        rows = 0 if self.collective == "allgather" else 2 * size
        return _input(self.seed, index, round_, rows, self.columns + (index == self.odd))

    def entries(
        self, process_set_id: int, members: Sequence[int], index: int, round_: int
    ) -> list[Entry]:
        """Return what the member at `index` enqueues."""
        name = f"{self.collective}.{self.name}"
        if self.collective == "barrier":
            return [Entry(Request(process_set_id, name, "barrier"))]
        array = self.input(index, len(members), round_)
        grouped = self.collective == "grouped"
        reduces = self.collective in ("allreduce", "reducescatter", "grouped")
        request = Request(
            process_set_id,
            name,
            "allreduce" if grouped else self.collective,
            "float64",
            array.shape,
            HOST_DEVICE,
            int(self.op) if reduces else 0,
            members[self.root] if self.collective == "broadcast" else NO_RANK,
            group=name if grouped else "",
            group_size=2 if grouped else 0,
        )
        if grouped:
            return [
                Tensor(request._replace(name=f"{name}_{number}of2"), array + number)
                for number in range(2)
            ]
        splits = (2,) * len(members) if self.collective == "alltoall" else ()
        return [Tensor(request, array, splits)]

    def expected(self, index: int, size: int, round_: int, present: Sequence[int]) -> list[Array]:
        """Return what the member at `index` gets where only those `present` have not joined."""
        inputs = [self.input(each, size, round_) for each in present]
        match self.collective:
            case "barrier":
                return []
            case "broadcast":
                return [self.input(self.root, size, round_)]
            case "allgather":
                return [np.concatenate(inputs)]
            case "alltoall":
                return [np.concatenate([each[2 * index : 2 * index + 2] for each in inputs])]
            case "grouped":
                return [self._reduced([each + n for each in inputs], size) for n in range(2)]
        total = self._reduced(inputs, size)
        if self.collective == "reducescatter":
            total = np.split(total, [*itertools.accumulate(split_rows(2 * size, size))])[index]
        return [total]

    def _reduced(self, inputs: Sequence[Array], size: int) -> Array:
        if self.op == ReduceOp.MIN:
            return np.min(inputs, 0)  # type: ignore[no-any-return]
        if self.op == ReduceOp.MAX:
            return np.max(inputs, 0)  # type: ignore[no-any-return]
        total: Array = np.sum(inputs, 0)
        return total * (1.0 / size) if self.op == ReduceOp.AVERAGE else total


@lru_cache(maxsize=1024)  # All ranks ask for the same.
def _input(seed: int, index: int, round_: int, rows: int, columns: int) -> Array:
    """Return what nobody may change; `rows` is 0 where one more may come at random."""
    lot = np.random.Generator(np.random.PCG64([seed, index, round_]))
    rows = rows or 1 + index + (int(lot.integers(0, 4)) == 0)
    array = lot.integers(0, 9, (rows, columns)).astype(np.float64)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class Message:
    """A tensor that each of some ranks sends to one, which takes them as they come."""

    name: str
    senders: tuple[int, ...]
    receiver: int
    columns: int
    searches: bool  # The receiver asks who has sent first.

    def data(self, sender: int) -> Array:
        return np.arange(self.columns, dtype=np.float64) + 100 * sender

    def label(self, sender: int) -> str:
        return f"point_to_point.{sender}.{self.receiver}.{self.name}"

    def entry(self, sender: int, *, sends: bool) -> Tensor:
        """Return what the sender, or the receiver, enqueues."""
        request = Request(
            GLOBAL_ID,
            self.label(sender),
            "point_to_point",
            "float64",
            (self.columns,),
            HOST_DEVICE,
            root_rank=sender,
            parties=(min(sender, self.receiver), max(sender, self.receiver)),
        )
        return Tensor(request, self.data(sender) if sends else np.zeros(self.columns))

    def search(self, senders: Sequence[int]) -> Entry:
        """Return the question which of the senders has sent first."""
        request = Request(
            GLOBAL_ID,
            f"find_sender.{self.name}.{len(senders)}",
            "find_sender",
            shape=tuple(senders),
            settings="\n".join(map(self.label, senders)),
            parties=(self.receiver,),
        )
        return Entry(request)


@dataclass(frozen=True)
class Epoch:
    """What the members of a set do until they have waited for all of it."""

    calls: tuple[Call, ...]
    rounds: tuple[int, ...]  # How many rounds each member makes before it joins.
    joins: bool
    ordered: bool = False  # All make the calls in one order, and may wait for one before the next.
    members: tuple[int, ...] = ()  # Of a set that all ranks add before; empty: all ranks.
    removes: bool = False  # All ranks remove the set at the end,
    formed: bool = False  # Its members alone make the set, and release it.
    messages: tuple[Message, ...] = ()  # Which come first; of all ranks.
    dangling: tuple[int, ...] = ()  # while a tensor of these members, by index, waits for others.


@dataclass(frozen=True)
class Kill:
    """A rank is killed, or its host is lost, which nobody tells the other hosts."""

    at: float
    rank: int
    host: bool = False


@dataclass(frozen=True)
class Trouble:
    """Something that befalls a rank, or the connections between two, while both go on.

    | kind | what |
    |---|---|
    | stop | the rank is stopped for some seconds |
    | stall | nothing that it sends to `other` arrives for some seconds |
    | cut | what it has open with `other` ends, with what is under way |
    | part | the same holds between all ranks of their hosts |
    """

    at: float
    kind: str
    rank: int
    other: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Quit:
    """A rank raises an exception, which ends it, at the step of its script of this number."""

    rank: int
    step: int


@dataclass(frozen=True)
class Retuning:
    """Rank 0 orders other settings while ranks go on, as autotuning does."""

    at: float
    threshold_bytes: int
    cache_capacity: int
    cycle_time_ms: float
    allreduce: str

    @property
    def order(self) -> Retune:
        times = self.threshold_bytes, self.cycle_time_ms
        return Retune(*times, self.cache_capacity, self.allreduce, SMALLEST_PIECE)


@dataclass(frozen=True)
class Program:
    """A job: everything that happens in it, but for the order of events, which the seed decides."""

    seed: int
    hosts: tuple[tuple[int, ...], ...]
    epochs: tuple[Epoch, ...]
    fan_out: int = 32
    cache_capacity: int = 1024
    threshold_bytes: int = 1 << 20
    cycle_time_ms: float = 0.0
    stall_seconds: float = 0.0  # After which a rank is named that is late; 0: never.
    latency: float = 1e-4
    jitter: float = 1e-4  # The longest pause between two calls.
    eager_bytes: int = 1 << 16
    allreduce: str = "auto"
    retunings: tuple[Retuning, ...] = ()
    kills: tuple[Kill, ...] = ()
    quits: tuple[Quit, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    leaver: int | None = None  # The rank that shuts down while others go on.

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))


def make_program(seed: int, *, calm: bool = False) -> Program:
    """Return the program of a seed; in a `calm` one ranks only end."""
    lot = random.Random(seed)
    size = lot.choice((1, 2, 2, 3, 3, 4, 5, 6))
    cuts = sorted(lot.sample(range(1, size), lot.randint(0, size - 1)))
    hosts = tuple(tuple(range(a, b)) for a, b in itertools.pairwise([0, *cuts, size]))
    epochs = tuple(_make_epoch(lot, size, number) for number in range(lot.randint(1, 3)))
    latency, jitter = lot.choice((5e-5, 5e-4, 5e-3)), lot.choice((0.0, 1e-4, 3e-3))
    kills: tuple[Kill, ...] = ()
    if size > 1 and lot.random() < 0.3:
        at = (latency + jitter) * lot.choice((1, 10, 50)) * lot.random()
        kills = (Kill(at, lot.randrange(size), host=lot.random() < 0.3),)
        if size > 2 and lot.random() < 0.3:
            kills += (Kill(at + 2e-3 * lot.random(), lot.randrange(size)),)
    quits: tuple[Quit, ...] = ()
    if lot.random() < 0.3:
        count = lot.choice((1, 1, 2))
        quits = tuple(Quit(lot.randrange(size), lot.randrange(40)) for _ in range(count))
    retunings: tuple[Retuning, ...] = ()
    if lot.random() < 0.3:
        retunings = tuple(
            Retuning(
                (latency + jitter) * 50 * lot.random(),
                lot.choice((0, 256, 1 << 20)),
                lot.choice((0, 1, 3, 1024)),
                lot.choice((0.0, 1.0)),
                lot.choice(("", "auto", "ring")),
            )
            for _ in range(lot.randint(1, 3))
        )
    program = Program(
        seed,
        hosts,
        epochs,
        fan_out=lot.choice((1, 2, 32)),
        cache_capacity=lot.choice((0, 1, 3, 8, 1024)),
        threshold_bytes=lot.choice((0, 256, 1 << 20)),
        cycle_time_ms=lot.choice((0.0, 0.0, 1.0)),
        stall_seconds=lot.choice((0.0, 0.0, 0.002, 1.0)),
        latency=latency,
        jitter=jitter,
        eager_bytes=lot.choice((0, 1 << 16)),
        allreduce=lot.choice(ALLREDUCES),
        retunings=retunings,
        kills=kills,
        quits=quits,
        leaver=lot.randrange(size) if not (kills or quits) and lot.random() < 0.5 else None,
    )
    if calm or lot.random() < 0.6:
        return program
    return replace(program, troubles=_make_troubles(lot, program))


def _make_troubles(lot: random.Random, program: Program) -> tuple[Trouble, ...]:
    """Draw troubles; only ranks of different hosts have connections that can be cut."""
    troubles = []
    scale = program.latency + program.jitter
    for _ in range(lot.randint(1, 3)):
        rank = lot.randrange(program.size)
        far = [other for host in program.hosts if rank not in host for other in host]
        at = scale * lot.choice((1, 10, 50)) * lot.random()
        kind = lot.choice(("stop", "stall", "cut", "part") if far else ("stop",))
        other = lot.choice(far) if far else rank
        if kind in ("cut", "part") and program.leaver is not None:
            kind = "stall"
        seconds = lot.choice((scale, 0.1, 1.5)) * lot.random()
        troubles.append(Trouble(at, kind, rank, other, seconds))
    return tuple(troubles)


def _make_epoch(lot: random.Random, size: int, number: int) -> Epoch:
    members: tuple[int, ...] = ()
    if size > 1 and lot.random() < 0.4:
        members = tuple(sorted(lot.sample(range(size), lot.randint(1, size - 1))))
    count = len(members) or size
    joins = lot.random() < 0.6
    rounds = tuple(lot.randint(0, 3) if joins else 2 for _ in range(count))
    last = max(range(count), key=rounds.__getitem__)
    calls = tuple(
        Call(
            f"{number}.{each}",
            lot.choice(COLLECTIVES),
            lot.choice(OPS),
            last,
            lot.choice((1, 2, 40)),
            lot.randrange(1 << 30),
            lot.randrange(count) if count > 1 and not joins and lot.random() < 0.05 else None,
        )
        for each in range(lot.randint(1, 5))
    )
    # A set has to go before another one may have the same members.
    formed = bool(members) and lot.random() < 0.4
    removes = bool(members) and not formed
    dangling: tuple[int, ...] = ()
    if removes and count > 1 and lot.random() < 0.4:
        dangling = tuple(lot.sample(range(count), lot.randint(1, count - 1)))
    messages: tuple[Message, ...] = ()
    if not members and size > 1 and lot.random() < 0.3:
        messages = tuple(_make_message(lot, size, f"{number}.{each}") for each in range(2))
    ordered = lot.random() < 0.4
    return Epoch(calls, rounds, joins, ordered, members, removes, formed, messages, dangling)


def _make_message(lot: random.Random, size: int, name: str) -> Message:
    receiver, *others = lot.sample(range(size), size)
    senders = tuple(sorted(lot.sample(others, lot.randint(1, len(others)))))
    return Message(name, senders, receiver, lot.choice((0, 1, 300)), lot.random() < 0.7)
