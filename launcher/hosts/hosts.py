"""Hosts and their slots: what -H, a hostfile and a discovery script say."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from hvdlite.common.base.errors import ConfigError

HOST = re.compile(r"([\w.-]+)(?::(\d+))?", re.ASCII)
HOSTFILE_LINE = re.compile(r"([\w.-]+)(?::(\d+)|\s+slots\s*=\s*(\d+))?", re.ASCII)
# How an address of IPv6 begins.
IPV6 = re.compile(r"\[[\da-f]*:|[\da-f:]*::|([\da-f]{1,4}:){7}", re.ASCII | re.IGNORECASE)
MOST_SLOTS = (1 << 16) - 1  # each rank listens on a port of its host
HOSTFILE_FORM = "name slots=number, name:number or name"
LOCAL_NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks may run on it."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"

    @property
    def remote(self) -> bool:
        """It is not the host that this runs on, as far as its name tells."""
        here = socket.gethostname()
        return self.name not in (*LOCAL_NAMES, here, here.partition(".")[0])


def parse_hosts(text: str, source: str = "--hosts") -> tuple[Host, ...]:
    """Read ``name:slots,name:slots``; a host without a number has one slot."""
    return _without_duplicates(
        [
            _host(HOST, part.strip(), f"{source}: {part!r}", "name:slots")
            for part in text.split(",")
        ],
        source,
    )


def read_hostfile(path: str, source: str = "--hostfile") -> tuple[Host, ...]:
    """Read lines of ``name slots=number`` or ``name:number``; ``#`` starts a comment.

    A host without a number has one slot. `source` is the flag or variable that names the file.
    """
    try:
        # Editors of Windows write a mark of the encoding at the beginning.
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot read {path}: {error}") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text:
            where = f"{path}, line {number}: {text!r}"
            hosts.append(_host(HOSTFILE_LINE, text, where, HOSTFILE_FORM))
    if not hosts:
        raise ConfigError(f"{source}: {path} names no host")
    return _without_duplicates(hosts, path)


def _host(pattern: re.Pattern[str], text: str, where: str, form: str) -> Host:
    name, number = _parts(pattern, text, where, form)
    slots = _slots(number or "1", where)
    if slots < 1:
        raise ConfigError(f"{where}: a host must have at least one slot")
    return Host(name, slots)


def _parts(pattern: re.Pattern[str], text: str, where: str, form: str) -> tuple[str, str]:
    """Return the name in `text`, and its number, which may be empty."""
    match = pattern.fullmatch(text)
    if match is None and IPV6.match(text):
        raise ConfigError(
            f"{where}: a host must be given by a name or an IPv4 address, as {form}: "
            "give a host that has an IPv6 address only a name (/etc/hosts or DNS)"
        )
    if match is None:
        raise ConfigError(f"{where}: a host must be given as {form}")
    name, *numbers = match.groups()  # a hostfile has two ways to write the number
    check_name(name, where)
    return name, next(filter(None, numbers), "")


def _slots(digits: str, where: str) -> int:
    # int() refuses thousands of digits.
    slots = int(digits) if len(digits) < 20 else MOST_SLOTS + 1
    if slots > MOST_SLOTS:
        raise ConfigError(f"{where}: a host must have at most {MOST_SLOTS} slots")
    return slots


def _without_duplicates(hosts: list[Host], source: str) -> tuple[Host, ...]:
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise ConfigError(f"{source}: host {host.name} is given twice: add its slots up")
        seen.add(host.name)
    return tuple(hosts)


def ranks_per_host(hosts: tuple[Host, ...], num_proc: int) -> tuple[int, ...]:
    """How many ranks each host gets when hosts are filled in their order.

    Raises `ConfigError` when there are too few slots.
    """
    slots = sum(host.slots for host in hosts)
    if num_proc > slots:
        raise ConfigError(
            f"-np {num_proc} asks for more ranks than the {slots} slots of the hosts "
            f"{','.join(map(str, hosts))}: ask for -np {slots} at most, or give the hosts "
            "more slots (name:slots)"
        )
    counts, left = [], num_proc
    for host in hosts:
        counts.append(min(host.slots, left))
        left -= counts[-1]
    return tuple(counts)


def host_of_rank(hosts: tuple[Host, ...], num_proc: int, rank: int) -> Host | None:
    """Return the host on which `rank` runs when hosts are filled in their order."""
    for host, count in zip(hosts, ranks_per_host(hosts, num_proc), strict=True):
        if rank < count:
            return host
        rank -= count
    return None


def parse_discovery(text: str, default_slots: int) -> dict[str, int]:
    """Return the slots by host, in the order of the lines of ``host`` or ``host:slots``.

    Empty lines are ignored. Raises `ConfigError` that names the line which is anything else.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line:
            continue
        where = f"discovery script, line {number}: {line[:200]!r}"
        name, said = _parts(HOST, line, where, "name or name:slots")
        slots = _slots(said or str(default_slots), where)
        if name in hosts:
            raise ConfigError(f"{where}: host {name} is given twice: add its slots up")
        if slots:  # A host with no slot is one that is not there.
            hosts[name] = slots
    return hosts


def check_name(name: str, where: str) -> None:
    """Raise `ConfigError` for the name of a host that programs would take for a flag."""
    if name.startswith("-"):
        raise ConfigError(f"{where}: the name of a host must not begin with '-'")
