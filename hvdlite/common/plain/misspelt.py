"""Names that begin as those of hvdlite's environment variables and are none: typing errors."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from hvdlite.common.plain.config import settings
from hvdlite.common.plain.setting import PREFIX

# What launchers and users say of a job, without the prefix. A test looks for others in the code.
OF_A_JOB = (
    "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "HOST_NAME",
    "RENDEZVOUS", "RENDEZVOUS_SERVER", "SECRET", "INCARNATION", "ELASTIC", "ELASTIC_DRIVER",
    "WORKER", "RANK_PROCESS", "SPARK_DEVICES",
    "ROLE", "SCHEDULER", "NUM_SERVERS", "NUM_WORKERS", "NODE_ID", "NODE_NUMBER", "PS_TOKEN",
    "PS_CURVE", "PS_JOIN",
)  # fmt: skip
# Beginnings of names that the launcher and tests give, without the prefix.
RESERVED = ("LAUNCHER_", "TEST_")


def misspelt(environ: Iterable[str]) -> list[str]:
    """Return a sentence about each variable of hvdlite in `environ` that does not exist."""
    known = [entry.variable for entry in settings()] + [PREFIX + name for name in OF_A_JOB]
    reserved = tuple(PREFIX + name for name in RESERVED)
    return [
        f"the environment variable {name} is unknown, and ignored"
        + (closest(name, known) or "; docs/settings.md lists those that there are")
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known and not name.startswith(reserved)
    ]


def closest(name: str, known: Collection[str]) -> str:
    """Return a question about which of the `known` names was meant; "" where none is like it."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f": did you mean {found[0]}?" if found else ""
