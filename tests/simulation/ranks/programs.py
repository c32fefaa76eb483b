"""Random programs of collectives."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.requests.messages import SMALLEST_PIECE, Retune
from tests.simulation.lines import NO_LIMIT
from tests.simulation.ranks.calls import Call, Message
from tests.simulation.start.programs import Start, make_start

COLLECTIVES = (
    "allreduce", "allreduce", "allgather", "allgather", "broadcast", "alltoall", "reducescatter",
    "grouped", "barrier",
)  # fmt: skip
ALLREDUCES = ("auto", "auto", "ring", "hierarchical", "trees", "halving", "doubling")
OPS = (ReduceOp.SUM, ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX)


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
    | mute | nothing that ranks of its host send to those of the other one arrives any more |
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
    bytes_per_second: float = NO_LIMIT  # That leave a host.
    jitter: float = 1e-4  # The longest pause between two calls.
    eager_bytes: int = 1 << 16
    allreduce: str = "auto"
    retunings: tuple[Retuning, ...] = ()
    kills: tuple[Kill, ...] = ()
    quits: tuple[Quit, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    leaver: int | None = None  # The rank that shuts down while others go on.
    start: Start | None = None  # How the ranks meet; None: they have met.

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
    if calm:
        return program
    if lot.random() < 0.4:
        program = replace(program, troubles=_make_troubles(lot, program))
    lot = random.Random(f"{seed} mutes")
    if len(hosts) > 1 and program.leaver is None and lot.random() < 0.15:
        one, other = lot.sample(hosts, 2)
        at = (latency + jitter) * lot.choice((1, 10, 50)) * lot.random()
        mute = Trouble(at, "mute", lot.choice(one), lot.choice(other))
        program = replace(program, troubles=(*program.troubles, mute))
    lot = random.Random(f"{seed} links")
    start = make_start(lot, size) if lot.random() < 0.3 else None
    return replace(
        program, bytes_per_second=lot.choice((NO_LIMIT, NO_LIMIT, 1e7, 1e6)), start=start
    )


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
