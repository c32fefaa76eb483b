"""Cuts a failing program down to the fewest events that still fail in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from tests.simulation.elastic.job import play_elastic
from tests.simulation.elastic.programs import ElasticProgram, make_elastic_program
from tests.simulation.lines import NO_LIMIT
from tests.simulation.ps.job import play_ps
from tests.simulation.ps.programs import PsProgram, make_ps_program
from tests.simulation.ranks.job import play
from tests.simulation.ranks.programs import Epoch, Program, make_program
from tests.simulation.start.programs import Start

T = TypeVar("T")
ORDERS = 10  # Of events, in which a smaller program is tried: each is a seed.
MOST_PLAYS = 3000
PLAIN = Program(0, ((0,),), (), jitter=0.0)


def shrink(kind: Kind, job: Any) -> Any:
    """Return the job of the smallest program found that breaks the invariant of `job`."""
    seed, law = job.program.seed, job.broken.law
    plays = 0
    found = True
    while found:
        found = False
        for smaller in kind.smaller(job.program):
            for order in range(ORDERS):
                plays += 1
                if plays > MOST_PLAYS:
                    return job
                tried = kind.play(replace(smaller, seed=seed + 1_000_003 * order))
                if tried.broken is not None and tried.broken.law == law:
                    job, found = tried, True
                    break
            if found:
                break
    return job


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs that have one thing less, those that have much less first."""
    for name in ("kills", "quits", "retunings", "troubles"):
        for number in range(len(getattr(program, name))):
            yield replace(program, **{name: _without(getattr(program, name), number)})
    if program.leaver is not None:
        yield replace(program, leaver=None)
    if program.start is not None:
        yield from (replace(program, start=each) for each in _smaller_starts(program.start))
    for number in range(len(program.epochs)):
        yield replace(program, epochs=_without(program.epochs, number))
    if program.size > 1:
        yield _without_last_rank(program)
    if len(program.hosts) > 1:
        yield replace(program, hosts=(tuple(range(program.size)),))
    for number, epoch in enumerate(program.epochs):
        for smaller in _smaller_epochs(epoch):
            epochs = (*program.epochs[:number], smaller, *program.epochs[number + 1 :])
            yield replace(program, epochs=epochs)
    for name in ("fan_out", "cache_capacity", "threshold_bytes", "cycle_time_ms", "stall_seconds",
                 "latency", "bytes_per_second", "jitter", "eager_bytes", "allreduce"):  # fmt: skip
        plain = getattr(PLAIN, name)
        if getattr(program, name) != plain:
            yield replace(program, **{name: plain})


def _smaller_starts(start: Start) -> Iterator[Start | None]:
    yield None
    for number in range(len(start.visitors)):
        yield replace(start, visitors=_without(start.visitors, number))
    for number in range(len(start.hitches)):
        yield replace(start, hitches=_without(start.hitches, number))
    if any(start.late):
        yield replace(start, late=(0.0,) * len(start.late))
    if start.served:
        yield replace(start, served=False)


def _smaller_epochs(epoch: Epoch) -> Iterator[Epoch]:
    for number in range(len(epoch.calls)):
        yield replace(epoch, calls=_without(epoch.calls, number))
    if epoch.joins and len(set(epoch.rounds)) == 1:
        yield replace(epoch, joins=False)
    for number in range(len(epoch.messages)):
        yield replace(epoch, messages=_without(epoch.messages, number))
    if epoch.dangling:
        yield replace(epoch, dangling=())
    for index, rounds in enumerate(epoch.rounds):
        if epoch.joins and rounds:
            yield replace(epoch, rounds=_with(epoch.rounds, index, rounds - 1))
    if not epoch.joins and max(epoch.rounds) > 1:
        yield replace(epoch, rounds=tuple(rounds - 1 for rounds in epoch.rounds))
    if not epoch.ordered:
        yield replace(epoch, ordered=True)


def _without_last_rank(program: Program) -> Program:
    last = program.size - 1
    hosts = tuple(tuple(rank for rank in host if rank != last) for host in program.hosts)
    epochs = []
    for epoch in program.epochs:
        if epoch.members and last not in epoch.members:
            epochs.append(epoch)
            continue
        members, rounds = epoch.members[:-1], epoch.rounds[:-1]
        if not rounds:
            continue
        end = len(rounds)
        root = max(range(end), key=rounds.__getitem__)
        calls = tuple(
            replace(call, root=root, odd=None if call.odd == end else call.odd)
            for call in epoch.calls
        )
        dangling = tuple(each for each in epoch.dangling if each < end)
        messages = (
            replace(each, senders=tuple(sender for sender in each.senders if sender != last))
            for each in epoch.messages
            if each.receiver != last
        )
        if len(dangling) == end:
            dangling = dangling[:-1]
        epochs.append(
            replace(
                epoch,
                members=members,
                rounds=rounds,
                calls=calls,
                messages=tuple(each for each in messages if each.senders),
                dangling=dangling,
            )
        )
    return replace(
        program,
        hosts=tuple(host for host in hosts if host),
        epochs=tuple(epochs),
        kills=tuple(replace(kill, rank=min(kill.rank, last - 1)) for kill in program.kills),
        quits=tuple(replace(each, rank=min(each.rank, last - 1)) for each in program.quits),
        troubles=tuple(each for each in program.troubles if last not in (each.rank, each.other)),
        leaver=None if program.leaver is None else min(program.leaver, last - 1),
        start=program.start and _start_without(program.start, last),
    )


def _start_without(start: Start, last: int) -> Start:
    hitches = [each for each in start.hitches if last not in (each.rank, each.other)]
    return replace(start, late=start.late[:-1], hitches=tuple(hitches))


def _without(items: tuple[T, ...], number: int) -> tuple[T, ...]:
    return items[:number] + items[number + 1 :]


def _with(items: tuple[T, ...], number: int, item: T) -> tuple[T, ...]:
    return (*items[:number], item, *items[number + 1 :])


# Elastic jobs.


def _smaller_elastic(program: ElasticProgram) -> Iterator[ElasticProgram]:
    if program.proves:
        yield replace(program, proves=False, visitors=())
    for name in ("happenings", "visitors"):
        for number in range(len(getattr(program, name))):
            yield replace(program, **{name: _without(getattr(program, name), number)})
    if program.min_np > 1:
        yield replace(program, min_np=1)
    spare = sum(slots for _, slots in program.hosts) - program.min_np
    for number, (_, slots) in enumerate(program.hosts):
        if len(program.hosts) > 1 and slots <= spare:
            yield replace(program, hosts=_without(program.hosts, number))
    for number, (host, slots) in enumerate(program.hosts):
        if slots > 1 and spare:
            rest = program.hosts[number + 1 :]
            yield replace(program, hosts=(*program.hosts[:number], (host, slots - 1), *rest))
    if program.steps > 2:
        yield replace(program, steps=program.steps // 2)
    if program.max_np is not None:
        yield replace(program, max_np=None)
    if program.failures_by_host:
        yield replace(program, failures_by_host=False)
    if program.bytes_per_second != NO_LIMIT:
        yield replace(program, bytes_per_second=NO_LIMIT)


# Jobs of the parameter server.

PLAIN_PS = PsProgram(0)


def _smaller_ps(program: PsProgram) -> Iterator[PsProgram]:
    for number in range(len(program.blows)):
        yield replace(program, blows=_without(program.blows, number))
    if program.proves:
        yield replace(program, proves=False, visitors=())
    if program.rows:
        yield replace(program, rows=False)
    for name in ("scales", "saves", "visitors"):
        for number in range(len(getattr(program, name))):
            yield replace(program, **{name: _without(getattr(program, name), number)})
    if program.follows is not None:
        yield replace(program, follows=None)
    for name, least in (("workers", 1), ("servers", 1), ("steps", program.loaded + 1)):
        if getattr(program, name) > least:
            yield replace(program, **{name: getattr(program, name) - 1})
    for name in ("every", "part_bytes", "momentum", "latency", "bytes_per_second", "pause"):
        if getattr(program, name) != getattr(PLAIN_PS, name):
            plain = replace(program, **{name: getattr(PLAIN_PS, name)})
            before = plain.follows  # Its updater is loaded, too.
            follows = before and replace(before, momentum=plain.momentum)
            yield replace(plain, follows=follows)
    for number, blow in enumerate(program.blows):
        if blow.seconds > 0.01:
            shorter = replace(blow, seconds=blow.seconds / 2)
            yield replace(program, blows=_with(program.blows, number, shorter))


class Kind(NamedTuple):
    """A kind of job: what makes the program of a seed, what plays it, and what cuts it down."""

    make: Callable[[int], Any]
    play: Callable[[Any], Any]
    smaller: Callable[[Any], Iterator[Any]]


KINDS = {
    "ranks": Kind(make_program, play, _smaller),
    "ps": Kind(make_ps_program, play_ps, _smaller_ps),
    "elastic": Kind(make_elastic_program, play_elastic, _smaller_elastic),
}
