"""hvdlite.run: a Python function on all ranks, from a script or a notebook."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hvdlite.as_horovod import active
from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.base.warn import warn_user
from hvdlite.launcher.command_line.flags import parse_args
from hvdlite.launcher.command_line.launcher_choice import MPIRUN
from hvdlite.launcher.command_line.options import LaunchOptions, resolve
from hvdlite.launcher.decisions import lines
from hvdlite.launcher.function_rank import CALL, Raised, dump_call, read_answers, read_failures
from hvdlite.launcher.jobs.outcome import JobOutcome
from hvdlite.launcher.jobs.start import run_job
from hvdlite.launcher.platforms.kubernetes import VARIABLES_BEGIN

T = TypeVar("T")
NO_RESULT = "has ended before its function returned a result, as by sys.exit() or os._exit()"
# Flags whose warnings have to name an argument of `run`.
ARGUMENTS = {"--disable-cache": "disable_cache"}
# In the errors of Horovod's own run, where the exit code of a worker ends an elastic job.
HOROVOD_PHRASE = "one or more processes exited with non-zero status"


class RemoteError(RuntimeError):
    """What happened on a rank, with its traceback; the cause of the exception that `run` raises."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    launcher: str | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    env: Mapping[str, str] | None = None,
    disable_cache: bool | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    host_discovery_script: str | None = None,
) -> list[T]:
    """Run ``func(*args, **kwargs)`` on `num_proc` ranks; returns the results in rank order.

    `np` is another name for `num_proc`. Its default is the number of slots of `hosts` or `hostfile`
    (at most `max_num_proc`), `min_num_proc` with a discovery script, and else 1. The function, its
    arguments and its results are sent by cloudpickle, so it may be defined in ``__main__`` or a
    notebook; it calls ``init()`` itself. `start_timeout` is in seconds; `env` replaces
    ``os.environ``; `executable` is the Python of the ranks. The other arguments are flags of
    hvdlite-run; `disable_cache` has no meaning here and warns. With `hosts` on other machines and
    ``launcher="mpirun"``, the working directory must be one that all hosts share.

    `min_num_proc` (or `min_np`) and `host_discovery_script` make the job elastic, which then needs
    hosts or a script. It waits for `num_proc` slots, and starts on all that are there, up to
    `max_num_proc`. The results are those of the first `min_num_proc` ranks of the last world;
    `cooldown_range` is two numbers of seconds.

    An exception on a rank is raised here as itself; its ``__cause__`` is a `RemoteError` with the
    rank and the traceback there. Where several ranks raise, it is the first that is not merely a
    `HorovodInternalError` about another rank. Under the name horovod, the failure of an elastic job
    is a `HorovodInternalError` with Horovod's words. Raises `HorovodInternalError` when a rank ends
    without an answer (killed, or exited), `ConfigError` (a `ValueError`) for arguments that
    contradict each other, and `KeyboardInterrupt` after Ctrl-C.
    """
    if use_gloo and use_mpi:
        raise ConfigError("use_gloo contradicts use_mpi: give one of them")
    if num_proc is not None and np is not None and num_proc != np:
        raise ConfigError(f"num_proc={num_proc} contradicts np={np}: give one of them")
    if isinstance(network_interfaces, Sequence) and not isinstance(network_interfaces, str):
        network_interfaces = ",".join(network_interfaces)
    least = _first(min_num_proc, min_np)
    elastic = least is not None or host_discovery_script is not None
    if elastic and not (hosts or hostfile or host_discovery_script):
        raise ConfigError(
            "min_np (min_num_proc) needs hosts, hostfile or host_discovery_script, such as "
            "hosts='localhost:2'"
        )
    flags = {
        "--num-proc": _first(num_proc, np, None if hosts or hostfile or elastic else 1),
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--launcher": launcher,
        "--mpi-args": mpi_args,
        "--network-interface": network_interface,
        "--network-interfaces": network_interfaces,
        "--min-np": least,
        "--max-np": _first(max_num_proc, max_np),
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "--host-discovery-script": host_discovery_script,
    }
    switches = {
        "--verbose": verbose,
        "--mpi": use_mpi,
        "--gloo": use_gloo,
        "--disable-cache": disable_cache,
        # Scripts for Horovod expect its policies of failures and of new hosts, and its variables.
        "--as-horovod": elastic and active(),
    }
    words = [f"{flag}={value}" for flag, value in flags.items() if value is not None]
    if cooldown_range is not None:
        words += ["--blacklist-cooldown-range", *map(str, cooldown_range)]
    words += [flag for flag, on in switches.items() if on]
    words += ["--", executable or sys.executable, "-m", "hvdlite.launcher.function_rank"]
    environ = os.environ if env is None else env
    # The call has one caller, so that no other pod of a job can take part.
    alone = {name: text for name, text in environ.items() if not name.startswith(VARIABLES_BEGIN)}
    options = resolve(parse_args(words), alone)
    for note in options.notes:
        flag = note.partition(" ")[0]
        warn_user(note.replace(flag, ARGUMENTS.get(flag, flag)))
    return _run(options, environ, (func, tuple(args), kwargs or {}))


def _run(options: LaunchOptions, environ: Mapping[str, str], call: tuple[Any, ...]) -> list[Any]:
    # Agents carry the call to other hosts. An mpirun does not, and other hosts cannot see our /tmp;
    # the working directory they often can.
    nodes = options.allocation.hosts if options.allocation is not None else ()
    elsewhere = options.launcher == MPIRUN and (options.remote or len(nodes) > 1)
    base = os.getcwd() if elsewhere else None
    directory = tempfile.mkdtemp(prefix="hvdlite-call-", dir=base)  # only the user may enter it
    try:
        Path(directory, CALL).write_bytes(dump_call(call))
        outcome = run_job(replace(options, call=directory), environ)
        if options.elastic is None:
            answers = read_answers(directory, range(options.num_proc))
        else:
            answers = _elastic_answers(directory, options.elastic.min_np, outcome)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if outcome.signal == signal.SIGPIPE:
        raise BrokenPipeError("nobody reads the output of the ranks")
    if outcome.signal is not None:  # Ctrl-C raises KeyboardInterrupt here, for example.
        signal.raise_signal(outcome.signal)
    if options.elastic is not None:
        options = replace(options, num_proc=min(options.elastic.min_np, len(outcome.results)))
        if options.as_horovod and lines.EXIT_CODE in outcome.sentence:
            _raise_as_horovod(answers, outcome.sentence)
    raise_first(answers)
    if outcome.code or len(answers) < options.num_proc:
        silent = [rank for rank in range(options.num_proc) if rank not in answers]
        rank = outcome.failure.rank if outcome.failure else silent[0] if silent else None
        raise HorovodInternalError(outcome.sentence or f"rank {rank} {NO_RESULT}", rank)
    return [answers[rank] for rank in range(options.num_proc)]


def _elastic_answers(directory: str, min_np: int, outcome: JobOutcome) -> dict[int, Any]:
    """Return the answers of the first `min_np` ranks of the last world, or what ended the job.

    What a worker has raised does not count where the job went on without it.
    """
    if outcome.code:
        return failures_of(read_failures(directory), outcome.sentence)
    counted = outcome.results[:min_np]
    answers = read_answers(directory, counted)
    return {rank: answers[number] for rank, number in enumerate(counted) if number in answers}


def failures_of(raised: Mapping[int, Raised], sentence: str) -> dict[int, Raised]:
    """Return what was raised by those of whom the sentence tells that ended an elastic job."""
    return {
        number: each for number, each in raised.items() if type(each.error).__name__ in sentence
    }  # fmt: skip


def _raise_as_horovod(answers: Mapping[int, Any], sentence: str) -> None:
    """Raise what a script of Horovod's looks for; its cause is what a worker raised."""
    error = HorovodInternalError(f"{HOROVOD_PHRASE}: {sentence}")
    try:
        raise_first(answers)
    except Exception as cause:
        raise error from cause
    raise error


def raise_first(answers: Mapping[int, Any]) -> None:
    """Raise the exception of the rank that failed first; victims come after their cause."""
    raised = [(a.victim, a.when, rank) for rank, a in answers.items() if isinstance(a, Raised)]
    if not raised:
        return
    rank = min(raised)[2]
    answer = answers[rank]
    cause = RemoteError(f"on rank {rank}:\n{answer.text.rstrip()}", rank)
    if answer.error is None:  # it cannot be pickled
        raise cause
    if hasattr(answer.error, "add_note"):
        answer.error.add_note(f"(raised on rank {rank})")
    raise answer.error from cause


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
