"""The lines about an elastic job on the terminal: one for each change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hvdlite.launcher.decisions.workers import Reset, Worker, World

MOST_PARTS = 6  # A longer list of ranks is cut.
EXIT_CODE = "exit code"  # What the end of a job says of each worker that ended with an error.


def count(number: int, thing: str) -> str:
    """Return "1 rank", "2 ranks" and so on."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def spans(numbers: Iterable[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return cut(["-".join(map(str, part)) for part in parts])


def spell_ranks(numbers: Sequence[int]) -> str:
    """Return "rank 3", "ranks 1-2" and so on."""
    return f"rank{'' if len(numbers) == 1 else 's'} {spans(numbers)}"


def ranks_are(numbers: Sequence[int]) -> str:
    return f"{spell_ranks(numbers)} {'is' if len(numbers) == 1 else 'are'}"


def cut(parts: Sequence[str], separator: str = ", ") -> str:
    """Return a list as text, the end of a long one as a number."""
    more = len(parts) - MOST_PARTS
    return separator.join(parts[:MOST_PARTS]) + (f"{separator}{more} more" if more > 0 else "")


def listed(names: Sequence[str]) -> str:
    """Return the first of `names`, and how many more there are."""
    more = len(names) - MOST_PARTS
    return ", ".join(names[:MOST_PARTS]) + (f" and {more} more" if more > 0 else "")


def name(worker: Worker, world: World | None) -> str:
    """Return the name of a worker: its rank in the world, or the slot in which it starts."""
    if world is not None and worker.number in world.members:
        return f"rank {world.rank(worker.number)} (host {worker.host})"
    return f"the worker of host {worker.host}, slot {worker.slot}"


def ended(workers: Sequence[Worker], world: World | None) -> str:
    """Return who was lost, with host[slot], why, and the exit code, for the end of a job."""
    alike: dict[tuple[str, str, bool], list[Worker]] = {}
    for worker in workers:
        known = not worker.code or EXIT_CODE in worker.why
        why = worker.why if known else f"{worker.why} ({EXIT_CODE} {worker.code})"
        member = world is not None and worker.number in world.members
        alike.setdefault((worker.host, why, member), []).append(worker)
    parts = []
    for (host, why, member), group in alike.items():
        who = "a worker" if len(group) == 1 else f"{len(group)} workers"
        if world is not None and member:
            who = spell_ranks([world.rank(each.number) for each in group])
        place = f"host {host}[{spans({each.slot for each in group})}]"
        parts.append(f"{who} ({place}) {'was' if len(group) == 1 else 'were'} lost: {why}")
    return cut(parts, "; ")


def lost(workers: Sequence[Worker], world: World | None) -> str:
    whys: dict[tuple[str, str], list[Worker]] = {}
    for worker in workers:
        whys.setdefault((worker.host, worker.why), []).append(worker)
    parts = []
    for (host, why), group in whys.items():
        numbers = [
            world.rank(each.number) for each in group if world and each.number in world.members
        ]
        if len(numbers) < 2:
            names = cut([name(each, world) for each in group], " and ")
        else:
            names = f"{spell_ranks(numbers)} (host {host})"
        parts.append(f"{names} {'was' if len(group) == 1 else 'were'} lost: {why}")
    return cut(parts, "; ")


def renumbered(old: World, new: World) -> str:
    """Return which ranks have other numbers now, and which are new."""
    moves: list[tuple[list[int], list[int]]] = []
    old_ranks = {number: rank for rank, number in enumerate(old.members)}
    for rank, number in enumerate(new.members):
        before = old_ranks.get(number, rank)
        if before == rank:
            continue
        if moves and moves[-1][1][-1] == rank - 1 and moves[-1][0][-1] == before - 1:
            moves[-1][0].append(before)
            moves[-1][1].append(rank)
        else:
            moves.append(([before], [rank]))
    parts = [f"{ranks_are(before)} now {spans(after)}" for before, after in moves]
    fresh = [rank for rank, number in enumerate(new.members) if number not in old_ranks]
    if fresh:
        parts.append(f"{ranks_are(fresh)} new")
    return cut(parts)


def first_world(world: World) -> str:
    """Return the line for the first world, with the ranks of each host."""
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(world.hosts):
        hosts.setdefault(host, []).append(rank)
    placed = cut([f"{host}: {spans(numbers)}" for host, numbers in hosts.items()])
    return f"{_world(world)} ({placed})"


def _world(world: World) -> str:
    return f"world {world.epoch} has {count(len(world.members), 'rank')}"


def tells_of_world(line: str) -> bool:
    return bool(re.search(r"\bworld \d+ has \d+ ranks?\b", line))


def _spell(seconds: float) -> str:
    if seconds < 0.001:
        return "within 1 ms"
    return f"after {1000 * seconds:.0f} ms" if seconds < 1 else f"after {seconds:.1f} s"


def next_world(old: World, new: World, cause: str, seconds: float, redone: bool) -> str:
    """Return the line for a world that follows another."""
    parts = [f"{_spell(seconds)}, {_world(new)}"]
    parts += filter(None, [renumbered(old, new)])
    if not redone:
        parts.append("nothing is redone")
    elif new.commit:
        parts.append(f"what followed commit {new.commit} is redone")
    else:
        parts.append("all is redone, as there was no commit")
    return f"{cause}; {'; '.join(parts)}"


def _with_hosts(workers: Sequence[Worker], world: World) -> str:
    hosts = ", ".join(dict.fromkeys(worker.host for worker in workers))
    who = spell_ranks([world.rank(worker.number) for worker in workers])
    return f"{who} (host {hosts}) {'was' if len(workers) == 1 else 'were'}"


def names(workers: Sequence[Worker], world: World | None) -> str:
    return cut([name(worker, world) for worker in workers])


def cause(world: World, reset: Reset, gone: Sequence[Worker], kept: Sequence[Worker]) -> str:
    """Return why a world is over; ranks that are `gone` were removed, those `kept` returned."""
    parts = [lost(reset.losses, world)] if reset.losses else []
    parts += [f"{_with_hosts(gone, world)} removed"] if gone else []
    parts += [f"{_with_hosts(kept, world)} done, and kept"] if kept else []
    if reset.left.issuperset(world.members):
        broken = "no rank was lost, but all had an error"
    else:
        broken = "a rank lost its peer"
    return "; ".join(parts) or ("workers have come" if reset.kind else broken)
