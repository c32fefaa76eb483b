"""What tools written for Horovod find beside the driver: hosts, places and settings."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.common.base.host_update import HostUpdateResult, compare_hosts
from hvdlite.launcher.decisions.driver import RESET_LIMIT_EXCEEDED
from hvdlite.launcher.decisions.failures import Cooldowns
from hvdlite.launcher.decisions.hosts import order_hosts
from hvdlite.launcher.elastic.discovery_script import DiscoveryScript
from hvdlite.launcher.processes.event_loop import EventLoop

RESET_LIMIT_EXCEEDED_MESSAGE = RESET_LIMIT_EXCEEDED  # format(limit) gives the text.
SCRIPT_SECONDS = 60.0  # A script that takes longer is killed.


class HostDiscovery(ABC):
    """Finds the hosts of a job."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots of each host that is there now."""


class FixedHosts(HostDiscovery):
    """Hosts that change only by `set`."""

    def __init__(self, available_hosts: Mapping[str, int]) -> None:
        self._hosts = dict(available_hosts)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._hosts)

    def set(self, available_hosts: Mapping[str, int]) -> None:
        """Replace all hosts."""
        self._hosts = dict(available_hosts)


class HostDiscoveryScript(HostDiscovery):
    """Runs a script that prints ``host`` or ``host:slots``, one a line; `slots` is the default."""

    def __init__(self, discovery_script: str, slots: int | None = None) -> None:
        self._script = discovery_script
        self._slots = 1 if slots is None else slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Raise RuntimeError for a script that fails or never ends, ValueError for other lines."""
        answers: list[dict[str, int] | Exception] = []
        note = answers.append
        with (
            contextlib.closing(EventLoop()) as loop,
            contextlib.closing(DiscoveryScript(
                self._script, self._slots, os.environ, loop, note, note, SCRIPT_SECONDS
            )) as script,
        ):  # fmt: skip
            while not answers:
                script.look(loop.wait(script.due))
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]


class DiscoveredHosts:
    """The hosts at one moment; later changes do not alter it."""

    def __init__(self, host_slots: Mapping[str, int], host_assignment_order: Sequence[str]) -> None:
        self._slots = dict(host_slots)
        self._order = list(host_assignment_order)

    @property
    def host_slots(self) -> dict[str, int]:
        """The slots of each host."""
        return dict(self._slots)

    @property
    def available_hosts(self) -> set[str]:
        """The names of the hosts."""
        return set(self._slots)

    @property
    def host_assignment_order(self) -> list[str]:
        """The hosts in the order in which they are filled."""
        return list(self._order)

    def get_slots(self, host: str) -> int:
        """Return the slots of a host, 0 for one that is not there."""
        return self._slots.get(host, 0)

    def count_available_slots(self) -> int:
        """Return the slots of all hosts together."""
        return sum(self._slots.values())


class HostManager:
    """Keeps the hosts that a discovery finds, without those that are on the blacklist."""

    def __init__(
        self, discovery: HostDiscovery, cooldown_range: tuple[int, int] | None = None
    ) -> None:
        self._discovery = discovery
        self._cooldowns = Cooldowns(cooldown_range, random.random)
        self._lock = threading.Lock()  # Guards what follows.
        self._found: dict[str, int] = {}
        self._current = DiscoveredHosts({}, [])

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """The hosts that may be used now."""
        with self._lock:
            return self._current

    @property
    def found(self) -> dict[str, int]:
        """All that the last discovery has found, in its order."""
        with self._lock:
            return dict(self._found)

    def update_available_hosts(self) -> HostUpdateResult:
        """Discover, and return how the hosts have changed since the last call."""
        found = self._discovery.find_available_hosts_and_slots()
        with self._lock:
            self._found = dict(found)
            return self._filter()

    def _filter(self) -> HostUpdateResult:
        before, now = self._current, time.monotonic()
        slots = {
            host: count
            for host, count in self._found.items()
            if count and not self._cooldowns.excluded(host, now)
        }
        order = self.order_available_hosts(slots, before.host_assignment_order)
        self._current = DiscoveredHosts(slots, order)
        return compare_hosts(before.host_slots, slots)

    def blacklist(self, host: str) -> None:
        """Use a host no more, or not before its cool-down is over."""
        with self._lock:
            self._cooldowns.exclude(host, time.monotonic())
            self._filter()

    def is_blacklisted(self, host: str) -> bool:
        """Return whether a host may not be used now."""
        return self._cooldowns.excluded(host, time.monotonic())

    @staticmethod
    def order_available_hosts(available_hosts: Iterable[str], prev: Sequence[str]) -> list[str]:
        """Return the available hosts: the previous ones in their order, then the others."""
        return order_hosts(prev, available_hosts)


@dataclass(frozen=True)
class SlotInfo:
    """The place of a worker; all numbers are -1 for a slot that has none."""

    hostname: str
    rank: int = -1
    local_rank: int = -1
    cross_rank: int = -1
    size: int = -1
    local_size: int = -1
    cross_size: int = -1

    @classmethod
    def of(cls, hostname: str, place: dict[str, int]) -> SlotInfo:
        """Return the slot of a place as the driver's decisions have it: RANK, SIZE and so on."""
        return cls(hostname, **{key.lower(): value for key, value in place.items()})


@dataclass(frozen=True)
class Results:
    """How a job has ended.

    `error_message` is None after a success. `worker_results` has an exit code and the time of the
    end for each worker of the last world, by "host[slot]".
    """

    error_message: str | None
    worker_results: dict[str, tuple[int, float]]


class ElasticSettings:
    """Keeps what it is given, and any further settings, as attributes. Times are in seconds."""

    def __init__(
        self,
        discovery: Any,
        min_num_proc: int,
        max_num_proc: int | None,
        elastic_timeout: int | None,
        reset_limit: int | None,
        cooldown_range: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.discovery, self.min_num_proc = discovery, min_num_proc
        self.max_num_proc, self.elastic_timeout = max_num_proc, elastic_timeout
        self.reset_limit, self.cooldown_range = reset_limit, cooldown_range
        vars(self).update(kwargs)
