"""Random jobs of the parameter server, and what befalls their nodes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hvdlite.ps.connections.messages import SCHEDULER, SERVER, WORKER
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.clocks import MODES, SSP, SYNC
from tests.simulation.lines import NO_LIMIT
from tests.simulation.start.programs import Visitor

ROWS = 0.3  # The share of jobs with a table of rows.
PROVING = 0.15  # The share of jobs whose connections prove themselves: these take longer.
# Some come as a server or a worker, by the code of one, with another token.
VISITORS = ("garbage", "silent", "half", "replay", SERVER, WORKER)


@dataclass(frozen=True)
class Blow:
    """Something that happens to a node, or between two, for some seconds."""

    at: float
    kind: str  # "kill", "crash", "stop", "cut", "stall", "fill", "slow", "join", "jump"
    node: str
    other: str = ""
    seconds: float = 1.0
    sends: int = 0  # It happens when the node has sent so many messages, and not at a time,
    of: str = ""  # of this kind, if one is given: then `at` seconds later, and to the `other` one.

    @property
    def target(self) -> str:
        is_between = self.kind in ("cut", "stall")
        return self.other if self.of and self.other and not is_between else self.node


@dataclass(frozen=True)
class PsProgram:
    """A job of the parameter server."""

    seed: int
    servers: int = 1
    workers: int = 1
    mode: str = SYNC
    staleness: int | None = None
    steps: int = 4
    every: int = 0  # Updates from one snapshot to the next; 0: there are none.
    part_bytes: int = 24
    momentum: bool = False
    latency: float = 1e-4
    bytes_per_second: float = NO_LIMIT  # That leave a node.
    pause: float = 0.0  # Between two steps of a worker, at most.
    blows: tuple[Blow, ...] = ()
    scales: tuple[tuple[int, int], ...] = ()  # Step -> servers that worker 0 lets be left.
    saves: tuple[int, ...] = ()  # Steps before which worker 0 saves.
    # The step before which worker 0 saves, and that at which all load it, each once.
    back: tuple[int, int] | None = None
    follows: PsProgram | None = None  # The job whose checkpoint this one loads first.
    rows: bool = False  # Workers train a table of rows beside the other one.
    proves: bool = False  # Its connections are the real ones, with proofs.
    visitors: tuple[Visitor, ...] = ()  # Who come and know no token.

    @property
    def loaded(self) -> int:
        """The steps of the checkpoint that is loaded."""
        return self.follows.saves[-1] if self.follows is not None else 0

    @property
    def loses(self) -> bool:
        """Whether a server may lose what nobody has."""
        kills = [each for each in self.blows if each.kind in ("kill", "crash")]
        return self.every != 1 and any(each.target.startswith(SERVER) for each in kills)

    @property
    def options(self) -> TableOptions:
        return TableOptions(self.mode, self.staleness, part_bytes=self.part_bytes)


def make_ps_program(seed: int, *, calm: bool = False) -> PsProgram:
    """Return the program of a seed; in a `calm` one, nothing is aimed at changes of servers."""
    lot = random.Random(seed)
    servers, workers = lot.choice((1, 2, 2, 3)), lot.choice((1, 2, 2, 3))
    mode = lot.choice(MODES)
    latency = lot.choice((1e-5, 1e-4, 5e-3))
    pause = lot.choice((0.0, 1e-3, 0.3))
    steps = lot.randint(3, 9)
    every = lot.choice((0, 1, 1, 1, 3))
    names = [*named(SERVER, servers), *named(WORKER, workers)]
    if every:
        names.append(SCHEDULER)
    blows = []
    span = steps * (pause + 10 * latency) + lot.choice((0.0, 0.01, 0.5))
    for _ in range(lot.choice((0, 1, 1, 2, 2, 3, 4))):
        at = span * lot.random()
        kind = lot.choice(("kill", "kill", "kill", "crash", "stop", "cut", "stall", "fill", "slow"))
        node, other = lot.choice(names), lot.choice(names)
        seconds = lot.choice((0.01, 0.3, 2.0)) * lot.random()
        blows.append(Blow(at, kind, node, other, seconds))
        if lot.random() < 0.3:  # Two that come together.
            later = at + lot.choice((0.0, 1e-3, 0.1)) * lot.random()
            blows.append(Blow(later, lot.choice(("kill", "stop")), other, node, seconds))
    for _ in range(lot.choice((0, 0, 1, 2))):
        sends = lot.randint(1, 30 * steps)
        kind = lot.choice(("kill", "kill", "kill", "crash", "stop", "slow"))
        seconds = lot.choice((0.01, 0.3, 2.0)) * lot.random()
        blows.append(Blow(0.0, kind, lot.choice(names), seconds=seconds, sends=sends))
    for number in range(lot.choice((0, 0, 0, 1, 1, 2))):
        joiner = f"{SERVER} {servers + number}"
        blows.append(Blow(0.01 + span * lot.random(), "join", joiner))
        if lot.random() < 0.2:
            blows.append(Blow(0.02 + span * lot.random(), "kill", joiner, seconds=lot.random()))
    scales = tuple(
        (lot.randrange(1, steps), lot.randint(1, servers))
        for _ in range(lot.choice((0, 0, 0, 1, 2)))
    )
    saves = tuple(sorted(lot.sample(range(steps + 1), lot.choice((0, 0, 0, 1, 2)))))
    program = PsProgram(
        seed, servers, workers, mode, lot.randint(0, 2) if mode == SSP else None, steps, every,
        lot.choice((16, 24, 4096)), lot.random() < 0.5, latency, pause=pause, blows=tuple(blows),
        scales=scales, saves=saves,
    )  # fmt: skip
    if mode == SYNC and lot.random() < 0.2:
        saved = lot.randint(1, steps - 1)
        first = PsProgram(
            seed, lot.choice((1, 2, 3)), lot.choice((1, 2)), steps=saved, saves=(saved,),
            momentum=program.momentum,
        )  # fmt: skip
        program = replace(program, follows=first)
    if calm:
        return program
    more: list[Blow] = []
    if program.scales or any(blow.kind == "join" for blow in blows):
        more += _amid_changes(lot, program)
    if lot.random() < 0.2:
        jump = lot.choice((-3600.0, -1.0, -0.1, 3600.0)) * lot.random()
        more.append(Blow(span * lot.random(), "jump", SCHEDULER, seconds=jump))
    speed = random.Random(f"{seed} links").choice((NO_LIMIT, NO_LIMIT, 1e7, 1e6))
    program = replace(program, blows=(*program.blows, *more), bytes_per_second=speed)
    loads, rows = random.Random(f"{seed} loads"), random.Random(f"{seed} rows")
    program = _with_rows(rows, _with_load(loads, program))
    return _with_proofs(random.Random(f"{seed} proofs"), span, program)


def _with_proofs(lot: random.Random, span: float, program: PsProgram) -> PsProgram:
    """Let the connections of some jobs be the real ones, to which strangers come."""
    if lot.random() >= PROVING:
        return program
    visitors = tuple(
        Visitor(span * lot.random(), lot.choice(VISITORS), lot.randrange(8), lot.choice((0.1, 8.0)))
        for _ in range(lot.choice((0, 1, 1, 3)))
    )
    follows = program.follows and replace(program.follows, proves=lot.random() < 0.5)
    return replace(program, proves=True, visitors=visitors, follows=follows)


def _with_load(lot: random.Random, program: PsProgram) -> PsProgram:
    """Let some jobs go back amid training, and nodes be struck while they do."""
    if program.follows is not None or lot.random() < (0.4 if program.mode == SYNC else 0.7):
        return program
    saved, loaded = sorted(lot.sample(range(program.steps), 2))
    blows = []
    workers, servers = named(WORKER, program.workers), named(SERVER, program.servers)
    for _ in range(lot.choice((0, 1, 1, 2))):
        kind, seconds = lot.choice(("kill", "kill", "kill", "stop")), lot.choice((0.01, 0.3, 2.0))
        node, of = lot.choice(
            [(lot.choice(workers), each) for each in ("turn", "load", "load", "over", "over")]
            + [(lot.choice(servers), each) for each in ("loaded", "loaded", "restarted")]
        )
        at = program.latency * lot.choice((0, 1, 2, 4, 16)) * lot.random()
        others = [SCHEDULER] if program.every else []
        struck = lot.choice([node, node, *servers, *others])
        blows.append(
            Blow(at, kind, node, struck, seconds * lot.random(), lot.choice((1, 2, 3)), of)
        )
    if program.mode != SYNC and lot.random() < 0.5:
        blows += _tear(lot, program, "push", loaded + 1)
    return replace(program, back=(saved, loaded), blows=(*program.blows, *blows))


def _with_rows(lot: random.Random, program: PsProgram) -> PsProgram:
    """Let workers of some jobs train rows, too."""
    if lot.random() >= ROWS:
        return program
    torn = [] if lot.random() < 0.5 else _tear(lot, program, "push_rows", program.steps)
    follows = program.follows and replace(program.follows, rows=True)
    return replace(program, rows=True, blows=(*program.blows, *torn), follows=follows)


def _tear(lot: random.Random, program: PsProgram, kind: str, steps: int) -> list[Blow]:
    """Return what lets a push of one of so many steps come to some servers alone."""
    worker = lot.choice(named(WORKER, program.workers))
    server = lot.choice(named(SERVER, program.servers))
    sends = lot.randint(1, program.servers * steps)
    seconds = lot.choice((0.01, 0.3, 2.0)) * lot.random()
    at = program.latency * lot.choice((0, 1, 4)) * lot.random()
    return [
        Blow(0.0, "cut", worker, server, seconds, sends, kind),
        Blow(at, "kill", worker, "", 0.3 * lot.random(), sends, kind),
    ]


def _amid_changes(lot: random.Random, program: PsProgram) -> Iterator[Blow]:
    """Yield blows that fall when a server, or the scheduler, is in the middle of a change."""
    joiners = [blow.node for blow in program.blows if blow.kind == "join"]
    servers = [*named(SERVER, program.servers), *joiners]
    for _ in range(lot.choice((1, 1, 2))):
        node, kind = lot.choice(servers), lot.choice(("stand", "take", "taken", "ready", "ready"))
        other, at = "", 0.0
        if program.every and lot.random() < 0.4:
            other, at = SCHEDULER, program.latency * lot.choice((1, 4, 16)) * lot.random()
        blow = lot.choice(("kill", "kill", "kill", "crash", "stop"))
        seconds = lot.choice((0.01, 0.01, 0.3, 2.0)) * lot.random()
        yield Blow(at, blow, node, other, seconds, lot.choice((1, 1, 2)), kind)


def named(role: str, count: int) -> list[str]:
    """Return the names of nodes of a role."""
    return [f"{role} {number}" for number in range(count)]
