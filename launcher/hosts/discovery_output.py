"""What a discovery script prints: one host a line."""

from __future__ import annotations

import re

from hvdlite.common.base.errors import ConfigError

LINE = re.compile(r"([\w.-]+)(?::(\d+))?", re.ASCII)


def parse_discovery(text: str, default_slots: int) -> dict[str, int]:
    """Return the slots by host, in the order of the lines of ``host`` or ``host:slots``.

    Empty lines are ignored. Raises `ConfigError` that names the line which is anything else.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line:
            continue
        where = f"discovery script, line {number}: {line[:200]!r}"
        match = LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"{where}: a host must be given as name or name:slots")
        check_name(match[1], where)
        name, slots = match[1], int(match[2]) if match[2] else default_slots
        if name in hosts:
            raise ConfigError(f"{where}: host {name} is given twice: add its slots up")
        if slots:  # A host with no slot is one that is not there.
            hosts[name] = slots
    return hosts


def check_name(name: str, where: str) -> None:
    """Raise `ConfigError` for the name of a host that programs would take for a flag."""
    if name.startswith("-"):
        raise ConfigError(f"{where}: the name of a host must not begin with '-'")
