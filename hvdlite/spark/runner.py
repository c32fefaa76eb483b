"""hvdlite.spark.run: a Python function on ranks that are the tasks of a barrier stage."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.meeting.placement import new_secret
from hvdlite.launcher.function import raise_first
from hvdlite.launcher.function_rank import Raised, dump_call
from hvdlite.launcher.processes.error_text import last_exception
from hvdlite.missing_names import with_remedy
from hvdlite.spark.output import DriverOutput
from hvdlite.spark.task import Answer, Call, read_answer, run_task

T = TypeVar("T")
START_TIMEOUT, START_SECONDS = "HOROVOD_SPARK_START_TIMEOUT", 600.0
LOOK_SECONDS = 0.1
LOST_TASK = re.compile("ExecutorLostFailure|Python worker exited|Python worker failed")
# Ranks that only tell of another one's failure wait so long for that one to tell its own.
CAUSE_SECONDS = 1.0


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on `num_proc` ranks in Spark; returns the results in rank order.

    Each rank is a process that a task of Spark starts, all at once; the default of `num_proc` is
    ``spark.default.parallelism``. `start_timeout` is how long, in seconds, Spark may take to find
    room for all tasks (default: the variable HOROVOD_SPARK_START_TIMEOUT, or 600), and then the
    ranks to meet in ``init()``. `env` is added to the environment of the executors; `executable`
    is the Python of the ranks. What ranks print is printed here with the rank before it (and the
    time, with `prefix_output_with_timestamp`), or goes to `stdout` and `stderr`. With `verbose` of
    2 or more the ranks log what they do. `nics` are the network interfaces that they use.
    `use_gloo` has no effect; `use_mpi` and `extra_mpi_args` raise, since no mpirun is involved.

    An exception on a rank is raised here as itself, as `hvdlite.run` does; all ranks are ended.
    Raises `HorovodInternalError` when a rank ends without a result or an executor is lost,
    `TimeoutError` where Spark finds no room in time, `ConfigError` (a `ValueError`) for wrong
    arguments, and `RuntimeError` without an active SparkContext.
    """
    if use_mpi or extra_mpi_args:
        raise ConfigError(
            "use_mpi, extra_mpi_args: ranks in Spark meet without MPI; leave them out"
        )
    context, size, limit, settings = prepare(num_proc, start_timeout, nics, verbose)
    check_size(context, size)
    secret = new_secret()
    host = context.getConf().get("spark.driver.host") or "localhost"
    with contextlib.closing(
        DriverOutput(size, secret, host, stdout, stderr, prefix_output_with_timestamp)
    ) as output:
        pickled = dump_call((fn, tuple(args), dict(kwargs or {})))
        call = Call(pickled, settings | dict(env or {}), executable, secret, output.address)
        answers = _Job(context, size, call).run(limit)
    return [read_answer(answer) for answer in sorted(answers, key=lambda answer: answer.rank)]


def prepare(
    num_proc: int | None, start_timeout: float | None, nics: Sequence[str] | None, verbose: int
) -> tuple[Any, int, float, dict[str, str]]:
    """Return the context, the number of ranks, the limit of their start, and their settings."""
    try:
        from pyspark import SparkContext
    except ModuleNotFoundError as error:
        raise with_remedy(error, "pyspark", "pip install 'hvdlite[spark]'") from None

    context = SparkContext._active_spark_context
    if context is None:
        raise RuntimeError(
            "Could not find an active SparkContext: make a SparkSession before hvdlite.spark.run"
        )
    size = context.defaultParallelism if num_proc is None else num_proc
    limit = float(start_timeout or os.environ.get(START_TIMEOUT) or START_SECONDS)
    settings = {"HVDLITE_START_TIMEOUT": f"{limit:g}"}
    if nics:
        settings["HVDLITE_NETWORK_INTERFACES"] = ",".join(nics)
    if verbose > 1:
        settings["HVDLITE_LOG_LEVEL"] = "debug"
    return context, size, limit, settings


def check_size(context: Any, size: int) -> None:
    """Raise `ConfigError` for a number of ranks that can never run."""
    if size < 1:
        raise ConfigError(f"num_proc={size}: there must be at least one rank")
    slots = _slots(context)
    fixed = context.master.startswith("local") and not context.master.startswith("local-cluster")
    if fixed and slots is not None and size > slots:
        raise ConfigError(
            f"num_proc={size}: the master {context.master} has {slots} slots, and all ranks run at "
            "the same time; give it more, or start fewer ranks"
        )


def no_room(context: Any, size: int, when: str) -> str:
    """Return the sentence for ranks that Spark has not all started."""
    slots = _slots(context)
    return (
        f"Spark has found no room for {size} ranks at the same time {when}: it has "
        f"{'an unknown number of' if slots is None else slots} slots; start fewer ranks "
        "(num_proc), or give Spark more executors or cores"
    )


def _slots(context: Any) -> int | None:
    """Return how many tasks Spark can run at once now; None where it does not tell."""
    try:
        scala = context._jsc.sc()
        profile = scala.resourceProfileManager().defaultResourceProfile()
        return int(scala.maxNumConcurrentTasks(profile))
    except Exception:  # not a part of Spark's public API
        return None


class Stage:
    """The tasks of one call: `collect` runs them, in a thread. `error` is what Spark has raised."""

    def __init__(self, context: Any, name: str, collect: Callable[[], list[Any]]) -> None:
        from pyspark import InheritableThread

        self.group = f"hvdlite-{uuid.uuid4()}"
        self.answers: list[Any] = []
        self.error: Exception | None = None
        self._context, self._name, self._collect = context, name, collect
        self._thread = InheritableThread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self.group, self._name, interruptOnCancel=True)
            self.answers = self._collect()
        except Exception as error:
            self.error = error

    def runs(self, seconds: float = 0.0) -> bool:
        """Return whether tasks still run, after at most `seconds`."""
        self._thread.join(seconds)
        return bool(self._thread.is_alive())

    def end(self, seconds: float = 0.0) -> None:
        """Cancel what still runs after some seconds."""
        if self.runs(seconds):
            self._context.cancelJobGroup(self.group)
            self._thread.join()


class _Job:
    """The barrier stage of one call."""

    def __init__(self, context: Any, size: int, call: Call) -> None:
        self._context, self._size = context, size
        self._failures = failures = context.accumulator([], _list_parameter())

        def collect() -> list[Any]:
            tasks = context.parallelize(range(size), size).barrier()
            return list(tasks.mapPartitions(lambda _: run_task(call, failures)).collect())

        self._stage = Stage(context, "hvdlite.spark.run", collect)

    def run(self, limit_seconds: float) -> list[Answer]:
        """Return the answers of all ranks; raises as `hvdlite.spark.run`."""
        start_by, started = time.monotonic() + limit_seconds, False
        try:
            while self._stage.runs(LOOK_SECONDS) and not self._failures.value:
                started = started or self._all_started()
                if not started and time.monotonic() > start_by:
                    when = f"in {limit_seconds:g} s (start_timeout)"
                    raise TimeoutError(no_room(self._context, self._size, when))
            if self._failures.value:
                self._raise_failure()
            if self._stage.error is not None:
                self._raise_error(self._stage.error)
        finally:
            self._stage.end()
        return self._stage.answers

    def _raise_error(self, error: Exception) -> None:
        """Raise what Spark has raised, in words where it is well known."""
        text = str(error)
        if "BarrierJobSlotsNumberCheckFailed" in text:
            raise TimeoutError(no_room(self._context, self._size, "so far")) from error
        if reason := python_error(text):
            raise HorovodInternalError(f"a task could not start its rank: {reason}") from error
        lost = [line for line in text.splitlines() if LOST_TASK.search(line)]
        if lost:
            raise HorovodInternalError(f"Spark has lost a task with its rank: {lost[0]}") from error
        raise error

    def _raise_failure(self) -> None:
        """Raise the failure that caused the others; give victims time to be told apart."""
        give_up = time.monotonic() + CAUSE_SECONDS
        while all(_is_victim(answer) for answer in self._failures.value):
            if not self._stage.runs(LOOK_SECONDS) or time.monotonic() > give_up:
                break
        first = min(self._failures.value, key=lambda answer: (_is_victim(answer), answer.when))
        if first.pickled is None:
            raise HorovodInternalError(str(first), first.rank)
        raise_first({first.rank: read_answer(first)})

    def _all_started(self) -> bool:
        tracker = self._context.statusTracker()
        jobs = (tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._stage.group))
        stages = (tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds)
        return any(
            stage.numActiveTasks + stage.numCompletedTasks >= self._size
            for stage in stages
            if stage
        )


def python_error(text: str) -> str:
    """Return what has failed in the Python of the executors; empty if it was something else."""
    reason = last_exception(text.encode()) if "PYTHON_EXCEPTION" in text else ""
    remedy = (
        "the executors' Python, which PYSPARK_PYTHON names, needs hvdlite and what the function "
        "imports"
    )
    return f"{reason} ({remedy})" if reason else ""


def _list_parameter() -> Any:
    from pyspark.accumulators import AccumulatorParam

    class Appended(AccumulatorParam[list[Answer]]):
        def zero(self, value: list[Answer]) -> list[Answer]:
            return []

        def addInPlace(self, value1: list[Answer], value2: list[Answer]) -> list[Answer]:  # noqa: N802
            return value1 + value2

    return Appended()


def _is_victim(answer: Answer) -> bool:
    """Return whether the rank only tells of another one's failure."""
    raised = read_answer(answer)
    return isinstance(raised, Raised) and raised.victim
