"""Where hosts come from, for tools written for Horovod."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.base.host_update import HostUpdateResult, compare_hosts
from hvdlite.launcher.decisions.failures import Cooldowns
from hvdlite.launcher.decisions.hosts import order_hosts
from hvdlite.launcher.hosts.hosts import parse_discovery
from hvdlite.launcher.hosts.unreachable import spell_end
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.leading_process import READ_BYTES, LeadingProcess

SCRIPT_SECONDS = 60.0  # A script that takes longer is killed.
EVERY_SECONDS = 1.0  # From the start of a run to that of the next one.
LONGEST_SECONDS = 10.0  # A run that takes longer is killed.
MOST_BYTES = 1 << 20  # Of the output that is kept.
Found = Callable[[dict[str, int]], None]
Failed = Callable[[str], None]


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
        """Raise RuntimeError for a script that fails or never ends."""
        try:
            done = subprocess.run(
                self._script, shell=True, check=True, timeout=SCRIPT_SECONDS,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"the discovery script {self._script} failed: {error}") from error
        return parse_discovery(done.stdout, self._slots)


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


# Runs the discovery script of an elastic job, in the background and again and again.


class DiscoveryScript:
    """Calls ``found(hosts)`` after each run that went well, and ``failed(text)`` after others.

    `script` is a path or a line for a shell; `look` starts a run when it is time.
    """

    def __init__(
        self, script: str, default_slots: int, environ: Mapping[str, str], loop: EventLoop,
        found: Found, failed: Failed, longest_seconds: float = LONGEST_SECONDS,
    ) -> None:  # fmt: skip
        self._script, self._default_slots = script, default_slots
        self._environ, self._loop = environ, loop
        self._found, self._failed = found, failed
        self._longest_seconds = longest_seconds
        self._run: _Run | None = None
        self._next_at = 0.0
        self._kill_at = 0.0

    @property
    def due(self) -> float:
        """When `look` is to be called, in monotonic seconds."""
        return self._kill_at if self._run is not None else self._next_at

    def look(self, now: float) -> None:
        """Start a run that is due, or end one that takes too long."""
        if now < self.due:
            return
        if self._run is not None:
            self._run.close()
            self._run = None
            self._next_at = now
            self._failed(f"the discovery script {self._script} has not ended within "
                         f"{self._longest_seconds:g} seconds, and was killed")  # fmt: skip
            return
        self._next_at = now + EVERY_SECONDS
        self._kill_at = now + self._longest_seconds
        try:
            self._run = _Run(self._command(), self._environ, self._loop, self._conclude)
        except OSError as error:
            self._failed(f"the discovery script {self._script} cannot be run: {error.strerror}")

    def _command(self) -> str:
        """Return the line for the shell: a path may lack the ``./``, and have spaces."""
        is_file = os.path.isfile(self._script)
        return shlex.quote(os.path.abspath(self._script)) if is_file else self._script

    def _conclude(self, run: _Run) -> None:
        code, out, err = run.result()
        run.close()
        self._run = None
        if code:
            lines = [line.strip() for line in err.splitlines() if line.strip()]
            last = f" and said: {lines[-1]}" if lines else ""
            self._failed(f"the discovery script {self._script} {spell_end(code)}{last}")
            return
        try:
            hosts = parse_discovery(out, self._default_slots)
        except ConfigError as error:
            self._failed(f"{error} (of {self._script})")
        else:
            self._found(hosts)

    def close(self) -> None:
        """Leave no process behind."""
        if self._run is not None:
            self._run.close()
            self._run = None


class _Run:
    """One run; `ended` is called when the script has ended, whatever its children do."""

    def __init__(
        self, command: str, environ: Mapping[str, str], loop: EventLoop,
        ended: Callable[[_Run], None],
    ) -> None:  # fmt: skip
        self._process = LeadingProcess(
            ["/bin/sh", "-c", command], environ, loop, signal.SIGKILL, folder=None
        )
        self._loop, self._ended = loop, ended
        self._found = b""
        self._fd, writer = self._process.take_streams()
        os.close(writer)
        os.set_blocking(self._fd, False)
        self._end_fd = os.pidfd_open(self._process.pid)
        loop.listen(self._fd, self._read)
        loop.listen(self._end_fd, self._note_end)

    def _read(self, fd: int) -> bool:
        """Read what is there; return whether there may be more."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.forget(fd)
        self._found = (self._found + data)[:MOST_BYTES]
        return bool(data) and len(self._found) < MOST_BYTES

    def _note_end(self, _fd: int) -> None:
        while self._read(self._fd):
            pass
        self._ended(self)

    def result(self) -> tuple[int | None, str, str]:
        """Return how the script has ended, as `LeadingProcess.code`, its output and its errors."""
        said = self._process.said()
        return self._process.code, self._found.decode(errors="replace"), said

    def close(self) -> None:
        """Kill the script and its children, and close what belongs to it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.close()
        for fd in (self._fd, self._end_fd):
            self._loop.forget(fd)
            os.close(fd)
