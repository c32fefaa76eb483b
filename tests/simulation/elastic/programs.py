"""Random programs of elastic jobs: what happens to their workers, hosts and launcher."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace

from hvdlite.launcher.agents.channel import BEATS
from hvdlite.launcher.decisions import commands
from tests.simulation.lines import NO_LIMIT
from tests.simulation.start.programs import Visitor

SILENCE_SECONDS = 1.0  # After which an agent that says nothing is lost.
# Ways of what a cut between the launcher and a host stops.
TO_LAUNCHER, FROM_LAUNCHER = 1, 2
PROVING = 0.2  # The share of jobs whose connections prove themselves: these take longer.
VISITORS = ("garbage", "silent", "half", "replay", "claim", "claim")
GENTLE = ("show", "freeze", "jump", "stall", "part")  # Nobody dies by these.


@dataclass(frozen=True)
class Happening:
    """Something that happens to a job: to the worker `which` of the living ones, or to a host.

    | kind | what |
    |---|---|
    | kill, stop, raise | a worker is killed, stopped for good, or raises |
    | pause, hang | it is stopped for some seconds, or does not answer its agent |
    | close, return, late | it loses its connection, is done early, or says that the next is late |
    | lose, restore, leaving | a host is lost without a word, is back, or says that it will go |
    | show | discovery shows `hosts` |
    | stall | for some seconds, nothing arrives between launcher and host in the ways `way` |
    | part | ranks of `host` and of `other` do not reach each other for some seconds |
    | fell | the agents of a host are killed, and so are their workers |
    | freeze, jump | the launcher stops for some seconds, or its clock jumps by so many |
    """

    at: float
    kind: str
    which: int = 0
    host: str = ""
    hosts: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0
    way: int = 0
    other: str = ""


@dataclass(frozen=True)
class ElasticProgram:
    """An elastic job: its hosts, its plan, and what happens to it."""

    seed: int
    hosts: tuple[tuple[str, int], ...]
    min_np: int = 1
    max_np: int | None = None
    admit: str = commands.READY
    failures_by_host: bool = False
    steps: int = 40
    step_seconds: float = 0.1
    commit_every: int = 2
    bytes_per_second: float = NO_LIMIT  # That leave a host, or the launcher.
    happenings: tuple[Happening, ...] = ()
    # Hosts that have fewer devices than slots; with none, they have not even the job's directory.
    devices: tuple[tuple[str, int], ...] = ()
    proves: bool = False  # Connections of workers and agents are the real ones, with proofs.
    visitors: tuple[Visitor, ...] = ()  # Who come and do not know the secret.

    @property
    def is_graceful(self) -> bool:
        """Whether nobody dies, and no host seems to: the job has to succeed."""
        silent: defaultdict[str, float] = defaultdict(float)  # For how long hosts may be, at most.
        for each in self.happenings:
            if each.kind == "stall":  # It begins a while after a beat, or when another one ends.
                silent[each.host] += each.seconds + SILENCE_SECONDS / BEATS
        gentle = all(each.kind in GENTLE for each in self.happenings)
        return gentle and max(silent.values(), default=0.0) <= SILENCE_SECONDS


def make_elastic_program(seed: int, *, calm: bool = False) -> ElasticProgram:
    """Return the program of a seed; a `calm` one has working connections and clocks."""
    lot = random.Random(seed)
    names = "abcd"[: lot.randint(1, 4)]
    hosts = tuple((name, lot.randint(1, 3)) for name in names)
    graceful = lot.random() < 0.3
    happenings = _make_happenings(lot, hosts, graceful=graceful)
    steps, step_seconds = lot.choice(((200, 1e-3), (200, 1e-3), (40, 0.01), (20, 0.3)))
    program = ElasticProgram(
        seed,
        hosts,
        min_np=lot.choice((1, 1, min(3, sum(slots for _, slots in hosts)))),
        max_np=lot.choice((None, None, 3, 4)),
        admit=lot.choice((commands.READY, commands.WAIT)),
        failures_by_host=lot.random() < 0.2,
        steps=steps,
        step_seconds=step_seconds,
        commit_every=lot.choice((1, 1, 3)),
        happenings=tuple(happenings),
    )
    if calm or lot.random() < 0.4:
        return program
    troubles = _make_troubles(lot, happenings, graceful=graceful)
    if lot.random() < 0.3:
        troubles += _make_flap(lot, hosts)
    if not graceful and lot.random() < 0.3:  # Both ends give up, and soon reach each other again.
        seconds = SILENCE_SECONDS * (1.1 + 0.8 * lot.random())
        at, host = lot.choice((0.5, 2.5)) * lot.random(), lot.choice(hosts)[0]
        both = TO_LAUNCHER | FROM_LAUNCHER
        troubles.append(Happening(at, "stall", host=host, seconds=seconds, way=both))
    kills = [each.at for each in happenings if each.kind == "kill"]
    if program.failures_by_host and kills:  # While what was on a host that is given up ends.
        at = lot.choice(kills) + 0.8 * lot.random()
        troubles.append(Happening(at, "jump", seconds=1.5 + 1.5 * lot.random()))
    devices: tuple[tuple[str, int], ...] = ()
    if lot.random() < 0.2:
        devices = _make_devices(lot, program)
    speed = random.Random(f"{seed} links").choice((NO_LIMIT, NO_LIMIT, 1e6, 1e5))
    if not graceful:
        troubles += _make_falls(random.Random(f"{seed} agents"))
    return _prove(
        replace(
            program, happenings=(*happenings, *troubles), devices=devices, bytes_per_second=speed
        )
    )


def _make_falls(lot: random.Random) -> list[Happening]:
    """Draw agents that are killed."""
    count = lot.choice((0, 0, 0, 0, 0, 0, 1, 2))
    return [
        Happening(lot.choice((0.3, 2.5, 6.0)) * lot.random(), "fell", host=lot.choice("abcd"))
        for _ in range(count)
    ]


def _prove(program: ElasticProgram) -> ElasticProgram:
    """Let the connections of some jobs prove themselves, to which others come then."""
    lot = random.Random(f"{program.seed} proofs")
    if lot.random() >= PROVING:
        return program
    visitors = tuple(
        Visitor(3.0 * lot.random(), lot.choice(VISITORS), lot.randrange(8), lot.choice((0.1, 8.0)))
        for _ in range(lot.choice((0, 1, 1, 3)))
    )
    return replace(program, proves=True, visitors=visitors)


def _make_happenings(
    lot: random.Random, hosts: tuple[tuple[str, int], ...], *, graceful: bool
) -> list[Happening]:
    deaths = ("kill", "kill", "stop", "raise", "lose", "show", "leaving")
    kinds = ("show",) if graceful else deaths
    happenings = []
    at = lot.choice((0.0, 0.2, 2.0)) + 0.1 * lot.random()
    for _ in range(lot.randint(0, 5)):
        at += lot.choice((0.003, 0.003, 0.05, 1.0, 4.0)) * lot.random()
        kind = lot.choice(kinds)
        host = lot.choice("abcde")
        shown = tuple((name, lot.randint(1, 3)) for name in "abcde" if lot.random() < 0.5)
        if lot.random() < 0.5:  # One of them less.
            shown = tuple(each for each in hosts if each[0] != host)
        happenings.append(
            Happening(at, kind, lot.randrange(8), host, shown or hosts if kind == "show" else ())
        )
        if not graceful and lot.random() < 0.3:  # Two that come together.
            happenings.append(Happening(at + 3e-3 * lot.random(), "kill", lot.randrange(8)))
        if kind == "lose" and lot.random() < 0.7:
            happenings.append(Happening(at + 5 * lot.random(), "restore", host=host))
    return happenings


def _make_troubles(
    lot: random.Random, happenings: list[Happening], *, graceful: bool
) -> list[Happening]:
    """Draw what befalls connections, clocks and processes that go on; some beside other events."""
    kinds: tuple[str, ...] = ("freeze", "jump", "stall", "part")
    if not graceful:
        kinds += ("pause", "pause", "hang", "close", "return", "late", "stall")
    troubles = []
    for _ in range(lot.randint(1, 3)):
        at = lot.choice((0.5, 2.5, 6.0)) * lot.random()
        if happenings and lot.random() < 0.5:
            at = lot.choice(happenings).at + lot.choice((0.003, 0.05, 1.0)) * lot.random()
        kind = lot.choice(kinds)
        short = kind == "freeze" or (kind == "stall" and graceful)
        seconds = lot.choice((0.01, 0.2, 0.9) if short else (0.05, 0.5, 2.0, 8.0)) * lot.random()
        if kind == "stall" and not short and lot.random() < 0.5:  # About as long as counts.
            seconds = SILENCE_SECONDS * (1 + 0.6 * lot.random())
        host, other = lot.sample("abcd", 2)
        way = lot.choice((TO_LAUNCHER, FROM_LAUNCHER, TO_LAUNCHER | FROM_LAUNCHER))
        troubles.append(
            Happening(at, kind, lot.randrange(8), host, seconds=seconds, way=way, other=other)
        )
    return troubles


def _make_devices(lot: random.Random, program: ElasticProgram) -> tuple[tuple[str, int], ...]:
    """Draw hosts that cannot start all of their ranks: the others are enough for the job."""
    lacking = {name: lot.choice((0, 1, 1, 2)) for name in "abcde" if lot.random() < 0.5}
    for name, _ in program.hosts:
        whole = sum(slots for each, slots in program.hosts if each not in lacking)
        if whole < program.min_np:
            lacking.pop(name, None)
    return tuple(lacking.items())


def _make_flap(lot: random.Random, hosts: tuple[tuple[str, int], ...]) -> list[Happening]:
    """Let discovery show other hosts for a while, and then the first ones again."""
    at = lot.choice((0.3, 2.5)) * lot.random()
    others = tuple((name, lot.randint(1, 3)) for name in "abcde" if lot.random() < 0.5)
    gone = lot.choice(hosts)
    less = tuple(each for each in hosts if each != gone)
    until = at + lot.choice((0.05, 1.0, 3.0)) * lot.random()
    return [
        Happening(at, "show", hosts=lot.choice((others, less)) or hosts),
        Happening(until, "show", hosts=hosts),
    ]
