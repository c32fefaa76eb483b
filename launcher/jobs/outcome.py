"""How a job ended, in the words that its user reads last."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hvdlite.common.base.errors import DEPARTED, HAS_SHUT_DOWN
from hvdlite.launcher.command_line.job_kinds import ClusterOptions
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.decisions.endings import Failure
from hvdlite.launcher.decisions.lines import MOST_PARTS, listed
from hvdlite.launcher.hosts.hosts import host_of_rank

NOT_STARTED_CODE = 1
# Patterns of a cause that is well known, each with the remedy.
HINTS = {
    r"ModuleNotFoundError: No module named 'horovod(\.\w+)*'$":
        "hvdlite-run --as-horovod lets the script find hvdlite under that name",
    r"ModuleNotFoundError: No module named 'hvdlite'$":
        f"the ranks run another Python than hvdlite-run, which runs {sys.executable}: "
        "start the script with that one",
    r".*: ranks disagree on (shape|number of elements)":
        "is the model built alike on all ranks? A smaller last batch needs drop_last=True, or "
        "join() after the last one; calls without a name need one order on all ranks",
    r"BdbQuit": "a debugger needs a terminal: hvdlite-run --debug-rank N gives it to rank N",
}  # fmt: skip
# `reason_of_shutdown` tells what a rank has shut down after, which may be the end of its data.
DEPARTURE = re.compile(rf"rank (\d+) {HAS_SHUT_DOWN}(?: after .*?,)? {DEPARTED}")


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended. `sentence` is for people, and empty when all went well."""

    code: int = 0
    sentence: str = ""
    failure: Failure | None = None
    signal: int | None = None
    results: tuple[int, ...] = ()  # Of an elastic job: the workers whose answers count, in order.


def signal_outcome(number: int) -> JobOutcome:
    """Return the outcome of a job whose launcher got this signal."""
    return JobOutcome(128 + number, f"ended by {signal.Signals(number).name}", signal=number)


def failure_sentence(
    failure: Failure, codes: Mapping[int, int], cluster: ClusterOptions | None = None
) -> str:
    """Return what failed first and, where the cause is a well-known one, the remedy.

    `codes` are the exit codes of the ranks that have ended.
    """
    hints = [hint for pattern, hint in HINTS.items() if re.match(pattern, failure.cause)]
    departure = DEPARTURE.search(failure.cause)
    if departure and codes.get(int(departure[1])) == 0:
        hints.append(
            f"rank {departure[1]} has ended normally while rank {failure.rank} still called "
            "collectives: let all ranks make these calls, and where they have different numbers "
            "of batches, let each call join() after its last one"
        )
    ranks = cluster is not None and not cluster.independent
    if ranks and failure.code > 128 and not failure.by_choice:
        hints.append(
            "workers that are ranks end together; with --ps-workers independent, others "
            "would have gone on, and this one would have been started again"
        )
    lines = [
        f"{failure}; the job has been ended",
        *(f"hvdlite-run: hint: {hint}" for hint in hints),
    ]
    return "\n".join(lines)


def timeout_sentence(missing: list[int], options: LaunchOptions) -> str:
    """Return that these ranks had not started in time."""
    text = (
        f"{name_ranks(missing, options)} had not started after {options.start_timeout_seconds:g} "
        "seconds (--start-timeout): check that the hosts can be reached by ssh and have free slots"
    )
    hosts = _remote_hosts(missing, options)
    return f"{text}, such as by: ssh {hosts[0]} true" if hosts else text


def name_ranks(ranks: list[int], options: LaunchOptions) -> str:
    """Return how many ranks these are, which, and on which other hosts."""
    hosts = _remote_hosts(ranks, options)
    where = f" on {', '.join(hosts[:MOST_PARTS])}" if hosts else ""
    named = listed([str(rank) for rank in ranks])
    return f"{len(ranks)} of {options.num_proc} ranks ({named}){where}"


def _remote_hosts(ranks: list[int], options: LaunchOptions) -> list[str]:
    hosts = (host_of_rank(options.hosts, options.num_proc, rank) for rank in ranks)
    return list(dict.fromkeys(host.name for host in hosts if host is not None and host.remote))
