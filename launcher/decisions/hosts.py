"""The hosts: which discovery shows, which are away, where an agent runs, and which come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from hvdlite.launcher.decisions.failures import FOREVER, Cooldowns

LONGEST_DELAY_SECONDS = 60.0
# What an agent gives its workers from SIGTERM to SIGKILL when its launcher has gone.
ORPHAN_SECONDS = 1.0
# Of the time after which silence is a loss: so much later than the launcher may an agent find that
# the two are cut off. It may have heard the launcher until that gave it up, as each way can be cut
# by itself. Both send a beat in each fifth of that time, and look twice as often.
LATER = 1.4
# How long a host stays away whose agent was told to end, while discovery shows it: twice as long
# after each time.
LEAVE_SECONDS = 60.0
LONGEST_LEAVE_SECONDS = 3600.0


class AgentStage(Enum):
    """Whether a host has an agent."""

    ABSENT = "absent"
    COMING = "coming"
    UP = "up"


@dataclass
class AgentState:
    """The agent of a host. `losses` counts those in a row that failed to come, or were lost."""

    stage: AgentStage = AgentStage.ABSENT
    losses: int = 0
    retry_at: float = 0.0


@dataclass
class Leave:
    """A host will go, or is away until the time `until`, which its agent's end determines."""

    why: str
    seconds: float
    until: float = FOREVER


class Hosts:
    """What is known of each host."""

    def __init__(self, cooldowns: Cooldowns, host_timeout: float) -> None:
        self.found: dict[str, int] | None = None  # None: discovery has not answered yet.
        self.cooldowns = cooldowns
        # Until the workers of an agent that was cut off have ended: their slots are not free.
        self._orphans_delay = LATER * host_timeout + ORPHAN_SECONDS
        self._agents: dict[str, AgentState] = {}
        self._leaving: dict[str, Leave] = {}
        self._leaves: Counter[str] = Counter()
        self._limits: dict[str, int] = {}

    def agent(self, host: str) -> AgentState:
        known = self._agents.get(host)
        return self._agents.setdefault(host, AgentState()) if known is None else known

    def discover(self, hosts: dict[str, int]) -> None:
        """Take an answer of discovery; a host that it did not show may come back at once."""
        self.found = dict(hosts)
        self._leaving = {host: leave for host, leave in self._leaving.items() if host in hosts}

    def limit(self, host: str, slots: int) -> bool:
        """Use no more slots of a host, whatever discovery shows; return whether that is news."""
        if slots >= self._limits.get(host, slots + 1):
            return False
        self._limits[host] = slots
        return True

    def leave(self, host: str, why: str) -> float | None:
        """Note that a host will go; return for how long, or None where that is known."""
        if host in self._leaving:
            return None
        seconds = min(LEAVE_SECONDS * 2.0 ** self._leaves[host], LONGEST_LEAVE_SECONDS)
        self._leaves[host] += 1
        self._leaving[host] = Leave(why, seconds)
        return seconds

    def shown(self, host: str, now: float) -> bool:
        """Return whether discovery shows the host, and it neither will go nor has gone."""
        leave = self._leaving.get(host)
        return host in (self.found or {}) and (leave is None or now >= leave.until)

    def why_gone(self, host: str) -> str:
        """Return why a host is no longer used."""
        leave = self._leaving.get(host)
        return "discovery no longer shows it" if leave is None else leave.why

    def usable(self, now: float) -> dict[str, int]:
        """Return the slots of the hosts on which workers may run, in the order of discovery."""
        away = self.cooldowns.all_excluded(now)
        away |= {host for host, leave in self._leaving.items() if now < leave.until}
        away |= {host for host, agent in self._agents.items() if now < agent.retry_at}
        limit = self._limits.get
        found = (self.found or {}).items()
        return {host: min(slots, limit(host, slots)) for host, slots in found if host not in away}

    def may_return(self, host: str, now: float) -> bool:
        """Return whether the host is usable, or will be after some seconds."""
        excluded = self.cooldowns.excluded(host, now)
        return host in (self.found or {}) and not (
            excluded and self.cooldowns.until(host) == FOREVER
        )

    def may_take_over(self, now: float) -> bool:
        """Return whether a host is shown that does not leave, and may have workers in time."""
        return any(
            self.shown(host, now) and self.may_return(host, now) for host in self.found or {}
        )

    def counts(self, host: str) -> bool:
        """Return whether slots of the host are capacity: its agent is there, or first comes."""
        agent = self.agent(host)
        return agent.stage is AgentStage.UP or agent.losses == 0

    def start(self, host: str) -> None:
        self.agent(host).stage = AgentStage.COMING
        self._leaving.pop(host, None)

    def came(self, host: str) -> None:
        """Note that an agent can start workers, if one was expected."""
        agent = self.agent(host)
        if agent.stage is AgentStage.COMING:
            agent.stage, agent.losses = AgentStage.UP, 0

    def end(self, host: str, now: float) -> None:
        self.agent(host).stage = AgentStage.ABSENT
        leave = self._leaving.get(host)
        if leave is not None and leave.until == FOREVER:
            leave.until = now + leave.seconds

    def await_orphans(self, host: str, now: float) -> None:
        """Keep away from a host that was lost until its agent has found that, and ended workers."""
        self.agent(host).retry_at = now + self._orphans_delay

    def lose(self, host: str, now: float) -> float:
        """Keep away from a host whose agent was lost; return for how long, in seconds."""
        agent = self.agent(host)
        agent.stage = AgentStage.ABSENT
        agent.losses += 1
        delay = min(2.0 ** (agent.losses - 1), LONGEST_DELAY_SECONDS)
        agent.retry_at = max(agent.retry_at, now + delay)
        return agent.retry_at - now

    def with_agents(self) -> list[str]:
        """Return the hosts whose agents were started and have not ended."""
        return [host for host, each in self._agents.items() if each.stage is not AgentStage.ABSENT]

    def coming(self) -> list[str]:
        """Return the hosts whose agents were started and have not come yet."""
        return [host for host, each in self._agents.items() if each.stage is AgentStage.COMING]

    def next_change(self, now: float) -> float | None:
        """Return when the next host becomes usable."""
        times = [agent.retry_at for agent in self._agents.values() if agent.retry_at > now]
        times += [leave.until for leave in self._leaving.values() if now < leave.until < FOREVER]
        times += filter(None, [self.cooldowns.next_end(now)])
        return min(times, default=None)


def order_hosts(previous: Sequence[str], available: Iterable[str]) -> list[str]:
    """Return the available hosts: those of the last assignment in their old order, then the new.

    Ranks therefore never swap their order, and rank 0 is one that was there before.
    """
    new = dict.fromkeys(available)
    old = dict.fromkeys(host for host in previous if host in new)
    return [*old, *(host for host in new if host not in old)]
