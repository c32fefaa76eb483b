"""Who makes the others wait, and why: decisions on what ranks have counted of late.

In data-parallel training all steps end together, so the rank that is slow is the one that waits
least for the others. What it does longer than they do in a step tells the kind of its slowness, and
what its kernel and Python count tells the cause. Without I/O and clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hvdlite.launcher.decisions.lines import spell_ranks

FEWEST_STEPS, FEWEST_SECONDS = 3, 2.0
LEAST_SHARE, LEAST_SECONDS = 0.1, 1e-3  # Of a step. Others wait less for a rank that is not named.
LOOKS = 3  # In so many looks, one each second, a rank must be found before it is named.
SILENT_SECONDS = 300.0  # The same is not said again before.

DATA, SWAP, GARBAGE, BATCHES, CORE, CLOCK, COMPUTE, LINK, UNKNOWN = CAUSES = (
    "data", "swap", "garbage", "batches", "core", "clock", "compute", "link", "unknown",
)  # fmt: skip
MOST_FAULTS = 20.0  # Pages that a healthy rank reads from disk, in a second.
MOST_RETRANSMITS = 5.0  # Segments that a healthy host sends again, in a second.
LEAST_EXCHANGE = 0.2  # Share of the step from which a slow link matters.


class Pace(NamedTuple):
    """How a rank has spent its last seconds."""

    rank: int
    host: str
    seconds: float
    changes: Mapping[str, float]
    values: Mapping[str, float]  # What does not grow only: means over these seconds.

    @property
    def steps(self) -> float:
        """How many steps it has made."""
        return self.changes.get("steps_total", 0.0)


class Straggler(NamedTuple):
    """Ranks that make the others wait; `seconds` and `share` are of a step, or of a second."""

    ranks: tuple[int, ...]
    host: str  # "": they are on several.
    seconds: float
    share: float
    cause: str
    text: str


class Group:
    """The means of some ranks, in a step (or in a second, where steps are not counted)."""

    def __init__(self, paces: Sequence[Pace], by_step: bool) -> None:
        self.paces, self._by_step = paces, by_step

    def __len__(self) -> int:
        return len(self.paces)

    def mean(self, of: Callable[[Pace], float]) -> float:
        """Return a mean over the ranks."""
        return sum(map(of, self.paces)) / len(self.paces)

    def each(self, name: str) -> float:
        """Return how much a counter grows in a step."""
        return self.mean(lambda pace: grown(pace, name, self._by_step))

    def a_second(self, name: str) -> float:
        """Return how much a counter grows in a second."""
        return self.mean(lambda pace: grown(pace, name, by_step=False))

    def lately(self, name: str) -> float:
        """Return a value that does not grow only."""
        return self.mean(lambda pace: pace.values.get(name, 0.0))

    @property
    def hosts(self) -> set[str]:
        """Where they are."""
        return {pace.host for pace in self.paces}

    @property
    def more_than_cores(self) -> float:
        """How many processes of their hosts could run, and have no core."""
        return self.lately("runnable_processes") - self.lately("cores")


def grown(pace: Pace, name: str, by_step: bool) -> float:
    """Return how much a counter of a rank has grown in a step, or in a second."""
    return pace.changes.get(name, 0.0) / (pace.steps if by_step else pace.seconds)


def find(paces: Sequence[Pace]) -> Straggler | None:
    """Return who makes the others wait, if anybody does."""
    by_step = all(pace.steps >= FEWEST_STEPS for pace in paces)
    if len(paces) < 2 or any(pace.seconds < FEWEST_SECONDS for pace in paces):
        return None
    if not by_step and any(pace.steps for pace in paces):  # They have just begun, or stand still.
        return None
    every = Group(paces, by_step)
    whole = every.each("step_seconds_total") if by_step else 1.0
    if whole <= 0:
        return None
    slow, rest = _split(paces, by_step)
    lost = _more(rest, slow, "peers_waited_seconds_total")
    link = _slow_link(every, whole) if by_step else None
    if not max(LEAST_SHARE * whole, LEAST_SECONDS) <= lost <= whole:  # More is no part of steps.
        return link
    cause, why = _cause(slow, rest, lost) if by_step else (UNKNOWN, "steps are not counted")
    if cause == UNKNOWN and link is not None:
        return link
    # More than half of the ranks are no stragglers: the others are quick.
    few = len(slow) <= len(rest)
    return _straggler(slow, lost, lost / whole, cause, why, by_step) if few else None


def _split(paces: Sequence[Pace], by_step: bool) -> tuple[Group, Group]:
    """Return the ranks that wait least, and the others: between them is the largest gap."""

    def waits(pace: Pace) -> float:
        return grown(pace, "peers_waited_seconds_total", by_step)

    ordered = sorted(paces, key=waits)
    gaps = [waits(later) - waits(earlier) for earlier, later in pairwise(ordered)]
    cut = gaps.index(max(gaps)) + 1
    return Group(ordered[:cut], by_step), Group(ordered[cut:], by_step)


def _more(one: Group, other: Group, name: str) -> float:
    return one.each(name) - other.each(name)


def _straggler(
    slow: Group, lost: float, share: float, cause: str, why: str, by_step: bool
) -> Straggler:
    ranks = tuple(sorted(pace.rank for pace in slow.paces))
    hosts = sorted({pace.host for pace in slow.paces})
    host = hosts[0] if len(hosts) == 1 else ""
    where = f" (host {host})" if host else ""
    who = f"{spell_ranks(ranks)}{where} {'makes' if len(ranks) == 1 else 'make'}"
    unit = "step" if by_step else "second"
    text = f"{who} the others wait {spell(lost)} a {unit} ({share:.0%}): {why}"
    return Straggler(ranks, host, lost, share, cause, text)


def spell(seconds: float) -> str:
    """Return a time with its unit."""
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _cause(slow: Group, rest: Group, lost: float) -> tuple[str, str]:
    """Return the cause, and in words what differs."""
    data, compute = (_more(slow, rest, f"{each}_seconds_total") for each in ("data", "compute"))
    what = "data" if data > compute else "compute"
    name = f"{what}_seconds_total"
    times = f"{_its(slow)} {what} takes {spell(slow.each(name))}, {_theirs(slow)} "
    times += spell(rest.each(name))
    known = _reason(slow, rest, lost)
    if max(data, compute) < lost / 2:
        return known or (UNKNOWN, "neither its compute nor its data takes longer than theirs")
    if known is not None:
        return known[0], f"{times}; {known[1]}"
    if what == "data":
        return DATA, times
    busy = slow.more_than_cores
    if busy >= 1 and busy >= rest.more_than_cores + 1 and not slow.hosts & rest.hosts:
        return CORE, f"{times}; {_busy(slow)}"
    return COMPUTE, times


def _its(slow: Group) -> str:
    return "its" if len(slow) == 1 else "their"


def _theirs(slow: Group) -> str:
    return "theirs" if len(slow) == 1 else "that of the others"


def _busy(slow: Group) -> str:
    count = round(slow.more_than_cores)
    processes = "process" if count == 1 else "processes"
    return f"{_its(slow)} host has {count} runnable {processes} more than cores"


def _reason(slow: Group, rest: Group, lost: float) -> tuple[str, str] | None:
    """Return what the kernel and Python know of the cause."""
    its, theirs = _its(slow), _theirs(slow)
    faults = slow.a_second("major_faults_total")
    if faults >= MOST_FAULTS and faults >= 5 * rest.a_second("major_faults_total"):
        swapped = slow.lately("swap_bytes") / (1 << 20)
        rest_of_it = f", and {swapped:.0f} MiB are swapped out" if swapped >= 1 else ""
        return SWAP, (
            f"{faults:.0f} pages a second are read from disk{rest_of_it}: {its} host is short of "
            "memory" + ("" if rest_of_it else f", or {its} steps read files that are mapped")
        )
    garbage = _more(slow, rest, "gc_seconds_total")
    if garbage >= lost / 2:
        return GARBAGE, f"Python's garbage collection takes {spell(min(garbage, lost))} of it"
    usual = rest.each("compute_seconds_total")
    rows, fewer = slow.each("samples_total"), rest.each("samples_total")
    if rows >= 1.05 * fewer > 0 and usual * (rows / fewer - 1) >= lost / 2:
        return BATCHES, f"{its} batches have {rows:.4g} rows, {theirs} {fewer:.4g}"
    waited = _more(slow, rest, "core_waited_seconds_total")
    if waited >= lost / 3:
        busy = f"; {_busy(slow)}" if slow.more_than_cores >= 1 else ""
        return CORE, f"{its} main thread waits {spell(waited)} longer for a core{busy}"
    speed, normal = slow.lately("core_speed"), rest.lately("core_speed")
    if 0 < speed <= 0.9 * normal and usual * (normal / speed - 1) >= lost / 2:
        return CLOCK, f"{its} core runs at {speed / normal:.0%} of the speed of {theirs}"
    return None


def _slow_link(every: Group, whole: float) -> Straggler | None:
    """Return the hosts whose link is slow: they send again, or answers reach one later than others.

    Packets that get lost are sent again by the host at their other end, too. All ranks wait for a
    link, so that none of them waits less than others.
    """
    by_host: dict[str, list[Pace]] = {}
    for pace in every.paces:
        by_host.setdefault(pace.host, []).append(pace)
    if len(by_host) < 2:
        return None
    exchange = every.each("exchange_waited_seconds_total")
    if exchange < LEAST_EXCHANGE * whole:
        return None
    here = {host: Group(paces, True) for host, paces in by_host.items()}
    again = {host: group.a_second("retransmits_total") for host, group in here.items()}
    most = max(again.values())
    ends = [host for host, count in again.items() if len(again) == 2 or count >= most / 3]
    if most >= MOST_RETRANSMITS and len(ends) == 2:
        return _between(ends, every, exchange, whole, sum(again[host] for host in ends))
    for host, group in here.items():
        rest = Group([pace for pace in every.paces if pace.host != host], True)
        later = _more(group, rest, "peers_waited_seconds_total")
        earlier = -sum(_more(group, rest, f"{name}_seconds_total") for name in ("compute", "data"))
        why = ""
        if most >= MOST_RETRANSMITS and ends == [host]:
            why = f"its host sends {most:.0f} TCP segments a second again, so its link loses some"
        elif later >= max(LEAST_SHARE * whole, LEAST_SECONDS) and earlier < later / 2:
            why = f"answers reach its host {spell(later)} later than others: its link is slow"
        if why and len(group) > 1:
            why = why.replace("its", "their")
        if why:
            return _straggler(group, exchange, exchange / whole, LINK, why, True)
    return None


def _between(
    hosts: Sequence[str], every: Group, exchange: float, whole: float, again: float
) -> Straggler:
    """Return a link of which both ends send again: nobody knows which of them is at fault."""
    ranks = tuple(sorted(pace.rank for pace in every.paces if pace.host in hosts))
    text = (
        f"the link between hosts {' and '.join(sorted(hosts))} makes all ranks wait "
        f"{spell(exchange)} a step ({exchange / whole:.0%}): {again:.0f} TCP segments a second are "
        "sent again"
    )
    return Straggler(ranks, "", exchange, exchange / whole, LINK, text)


class Watch:
    """Remembers who was found, so that a rank is named once, and not for a moment's delay."""

    def __init__(self) -> None:
        self.current: Straggler | None = None  # Who is slow at present.
        self._found: list[tuple[int, ...] | None] = []
        self._said: dict[tuple[tuple[int, ...], str], float] = {}

    def look(self, paces: Sequence[Pace], now: float) -> Straggler | None:
        """Take the paces of the last seconds; return whom to name now."""
        found = find(paces)
        self._found = [*self._found[1 - LOOKS :], found.ranks if found else None]
        lasts = len(self._found) == LOOKS and len(set(self._found)) == 1
        self.current = found if lasts else None
        if self.current is None:
            return None
        key = (self.current.ranks, self.current.cause)
        if now - self._said.get(key, -SILENT_SECONDS) < SILENT_SECONDS:
            return None
        self._said[key] = now
        return self.current
