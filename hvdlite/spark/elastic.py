"""hvdlite.spark.run_elastic: a function on ranks in Spark that goes on when some are lost."""

from __future__ import annotations

import contextlib
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TextIO, TypeVar

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.agents.channel import Channel
from hvdlite.launcher.decisions.commands import ElasticPlan, Finish, StartWorker
from hvdlite.launcher.elastic.direct_job import DirectJob, make_plan
from hvdlite.launcher.function_rank import dump_call
from hvdlite.launcher.processes.error_text import shorten
from hvdlite.spark.output import DriverOutput
from hvdlite.spark.runner import LOOK_SECONDS, Stage, check_size, no_room, prepare, python_error
from hvdlite.spark.task import Call, open_channel, run_elastic_task

T = TypeVar("T")
CAUSE_SECONDS = 1.0  # How long the driver may take to say why it ends.
LEAVE_SECONDS = 5.0  # How long tasks may take to end after their workers have.


def run_elastic(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on `num_proc` ranks in Spark, and go on when some are lost.

    The function is to use ``hvd.elastic.run``. Each rank is a process that a task of Spark starts,
    on a host of its own as far as the ranks know. When a rank is lost, its task fails, Spark tries
    it again (``spark.task.maxFailures`` times in all), and the others wait for the new rank: the
    job neither shrinks nor grows, so `min_num_proc` and `max_num_proc` must equal `num_proc` where
    they are given. `elastic_timeout` is how long, in seconds, ranks may be missing (default: the
    variable HVDLITE_ELASTIC_TIMEOUT, or 600), and at most `reset_limit` resets are allowed. All
    other arguments are those of `hvdlite.spark.run`.

    Returns the results in rank order. An exception that ends the job is raised here as itself.
    Raises `HorovodInternalError` where the job cannot go on otherwise, and as `hvdlite.spark.run`.
    """
    context, size, limit, settings = prepare(num_proc, start_timeout, nics, verbose)
    for name, number in (("min_num_proc", min_num_proc), ("max_num_proc", max_num_proc)):
        if number not in (None, size):
            raise ConfigError(
                f"{name}={number}: must equal num_proc={size}, as an elastic job in Spark replaces "
                "ranks and neither shrinks nor grows"
            )
    check_size(context, size)
    plan = make_plan(
        size, size, reset_limit=reset_limit, elastic_timeout=elastic_timeout, by_host=True
    )
    host = context.getConf().get("spark.driver.host") or "localhost"
    job = _SparkJob(plan, host, limit)
    with contextlib.closing(DriverOutput(
        size, job.secret, host, stdout, stderr, prefix_output_with_timestamp, job.accept
    )) as output:  # fmt: skip
        pickled = dump_call((fn, tuple(args), dict(kwargs or {})))
        call = Call(pickled, settings | dict(env or {}), None, job.secret, output.address)
        finish = _run(context, size, call, job, limit)
    return job.take_results(finish)


class _SparkJob(DirectJob):
    """The tasks are hosts with one slot each; they come by `accept`."""

    def __init__(self, plan: ElasticPlan, host: str, start_seconds: float) -> None:
        super().__init__(plan, host, start_seconds)
        self.tasks_seen = 0
        self._tasks: dict[str, Channel] = {}  # By the names of their hosts.
        self._answers: dict[int, bytearray] = {}
        self._over = False

    def accept(self, connection: socket.socket, name: str) -> None:
        """Take the connection of a task; called on any thread."""
        if self._over:  # Spark has tried a task again meanwhile, which ends now.
            connection.close()
            return
        self.loop.post(lambda: self._add(connection, name))

    def _add(self, connection: socket.socket, name: str) -> None:
        if self._over:
            connection.close()
            return
        self._tasks[name] = open_channel(
            connection, self.loop, self._received, partial(self._lost, name)
        )
        self.tasks_seen += 1
        self._show_hosts()

    def _show_hosts(self) -> None:
        self.driver.discovered(dict.fromkeys(self._tasks, 1), self.loop.now())

    def _lost(self, name: str) -> None:
        del self._tasks[name]
        for number in [number for number, host in self.hosts.items() if host == name]:
            self.hosts.pop(number)
        self.driver.agent_lost(name, "its task of Spark has ended", False, self.loop.now())
        if self._tasks:  # An answer without any host would be taken for one that has failed.
            self._show_hosts()

    def _received(self, kind: str, fields: list[Any]) -> None:
        number = fields[0]
        if kind == "part":
            self._answers.setdefault(number, bytearray()).extend(fields[1])
        elif kind == "exit":
            code, by_signal = fields[1:]
            answer = pickle.loads(self._answers[number]) if number in self._answers else None
            self.take_answer(number, answer, code, code - 128 if by_signal else 0)

    def start_process(self, worker: StartWorker, variables: dict[str, str]) -> None:
        task = self._tasks.get(worker.host)
        if task is not None:  # Else its end has been told already.
            task.send("start", worker.number, worker.start_rank, variables)

    def end_process(self, number: int) -> None:
        # The worker is its task's only one.
        if (task := self._tasks.get(self.hosts[number])) is not None:
            task.send("end", True)

    def drop_agent(self, host: str) -> None:
        super().drop_agent(host)
        if (task := self._tasks.get(host)) is not None:
            task.send("end", True)

    def end_all(self) -> None:
        self._over = True
        for task in self._tasks.values():
            task.send("end", False)

    def close(self) -> None:
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._tasks and time.monotonic() < deadline:
            self.loop.run_once(LOOK_SECONDS)
        for task in self._tasks.values():
            task.close()
        super().close()


def _run(context: Any, size: int, call: Call, job: _SparkJob, limit_seconds: float) -> Finish:
    """Run the job on tasks, each of which is tried again when its worker is lost.

    Return how the job has ended; raises what has gone wrong with the tasks.
    """

    def collect() -> list[Any]:
        tasks = context.parallelize(range(size), size)
        return list(tasks.mapPartitions(lambda _: run_elastic_task(call)).collect())

    start_by = time.monotonic() + limit_seconds
    stage = Stage(context, "hvdlite.spark.run_elastic", collect)

    def look() -> None:
        if job.tasks_seen < size and time.monotonic() > start_by:
            raise TimeoutError(no_room(context, size, f"in {limit_seconds:g} s"))
        if stage.error is not None and not job.over.wait(CAUSE_SECONDS):
            job.stop(1, _spell(stage.error, job.last_cause))

    try:
        return job.drive(look)
    finally:
        stage.end(LEAVE_SECONDS)


def _spell(error: Exception, last_cause: str) -> str:
    """Return why Spark tries a task no more."""
    if last_cause:
        return (
            "a task of Spark has lost its worker too often (spark.task.maxFailures; a master "
            f"local[N] tries once, and local[N,4] four times): {last_cause}"
        )
    text = str(error)
    return f"Spark has ended the tasks: {python_error(text) or shorten(text)}"
