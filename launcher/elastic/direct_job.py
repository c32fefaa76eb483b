"""An elastic job whose workers connect with this process itself: no agent of ours starts them.

One thread runs the job. What other threads have to say comes by the `post` of its loop.
"""

from __future__ import annotations

import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from hvdlite.as_horovod import active
from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.connections.address import Address, listen
from hvdlite.common.driver_link.server import WorkerServer
from hvdlite.common.meeting.placement import new_secret
from hvdlite.common.settings.config import Config
from hvdlite.launcher.command_line.job_kinds import check_cooldown
from hvdlite.launcher.decisions.commands import READY, WAIT, ElasticPlan, Finish, StartWorker
from hvdlite.launcher.decisions.endings import signal_name
from hvdlite.launcher.elastic.driver_loop import DriverLoop, worker_variables
from hvdlite.launcher.function import failures_of, raise_first
from hvdlite.launcher.function_rank import Raised
from hvdlite.launcher.processes.error_text import shorten
from hvdlite.launcher.processes.event_loop import EventLoop

GRACE_SECONDS = 0.5  # How long workers that were told of the end may take to end by themselves.
END_SECONDS = 5.0  # And how long after they were killed.
LOOK_SECONDS = 0.1  # The time between two looks of those who wait for the job.
INTERRUPTED_CODE = 130


def make_plan(
    least: int, most: int | None, *, reset_limit: int | None = None,
    cooldown: Sequence[int] | None = None, elastic_timeout: float | None = None,
    by_host: bool = False,
) -> ElasticPlan:  # fmt: skip
    """Return the plan of a job of `least` to `most` workers; the settings are this process's.

    Raises `ConfigError` for numbers that contradict each other. A failure is that of its host with
    `by_host`, a cool-down, or under the name of Horovod.
    """
    if least < 1:
        raise ConfigError(f"at least {least} workers: there must be at least one")
    if most is not None and most < least:
        raise ConfigError(f"at most {most} workers are less than {least}, the least")
    config = Config.from_environ()
    as_horovod = active()
    return ElasticPlan(
        num_proc=least,
        min_np=least,
        max_np=most,
        reset_limit=reset_limit,
        cooldown=None if cooldown is None else check_cooldown(cooldown, "cooldown_range="),
        elastic_timeout=config.elastic_timeout_seconds if elastic_timeout is None
        else elastic_timeout,
        admit=WAIT if as_horovod else READY,
        failures_by_host=by_host or as_horovod or cooldown is not None,
    )  # fmt: skip


class DirectJob(DriverLoop):
    """One elastic job, whose workers connect with `host`, a name of this host that they know.

    `workers_start_within` is how long a worker may take from its start to its connection.
    """

    def __init__(self, plan: ElasticPlan, host: str, workers_start_within: float) -> None:
        super().__init__(plan, EventLoop())
        self.plan = plan
        self.secret = new_secret()
        self.results: dict[int, Any] = {}  # By number of a worker.
        self.raised: dict[int, Raised] = {}
        self.last_cause = ""  # Of the loss of a worker.
        self.over = threading.Event()
        self.hosts: dict[int, str] = {}  # The hosts of the workers that have not ended.
        self._start_seconds = workers_start_within
        self._silence_seconds = Config.from_environ().elastic_worker_timeout_seconds
        self._start_by: dict[int, float] = {}  # For workers that have not connected yet.
        self._start_ranks: dict[int, int] = {}
        listener = listen(Address(host, 0))
        self._address = str(Address(host, listener.getsockname()[1]))
        self._server = WorkerServer(
            self.loop, listener, self.secret.encode(), self._said, self._closed,
            expects=lambda number: number in self.hosts,
        )  # fmt: skip

    # -- for those who start workers

    @abstractmethod
    def start_process(self, worker: StartWorker, variables: dict[str, str]) -> None:
        """Start a worker with these variables; `ended` is called when it has ended."""

    @abstractmethod
    def end_process(self, number: int) -> None:
        """End a worker that was started, at once."""

    @abstractmethod
    def end_all(self) -> None:
        """End all that runs, also workers that have returned."""

    def say(self, line: str) -> None:
        print(f"hvdlite: {line}", file=sys.stderr, flush=True)

    def ended(self, number: int, code: int, cause: str | None, by_signal: bool = False) -> None:
        """Note the end of a worker; see `Driver.worker_ended`."""
        if self.hosts.pop(number, None) is not None:
            self._server.hear_last_words(number)  # They come first.
            self._start_by.pop(number, None)
            self.driver.worker_ended(number, code, cause, by_signal, self.loop.now())

    def take_answer(self, number: int, answer: Any, code: int, signal_number: int = 0) -> None:
        """Note what a worker has left, its result or `Raised`, and its end."""
        cause = None
        if isinstance(answer, Raised):
            self.raised[number] = answer
            cause = shorten(answer.text.rstrip().rpartition("\n")[2])
        else:
            self.results[number] = answer
        if signal_number:
            cause = f"killed by {signal_name(signal_number)}"
        self.last_cause = cause or self.last_cause
        self.ended(number, code, cause, bool(signal_number))

    # -- commands of the driver

    def start_agent(self, host: str) -> None:
        """Take the host for ready: what has shown it can start workers there."""
        self.driver.agent_came(host, self.loop.now())

    def drop_agent(self, host: str) -> None:
        for number in [number for number, its in self.hosts.items() if its == host]:
            self.end_process(number)
            del self.hosts[number]

    def start_worker(self, worker: StartWorker) -> None:
        self.hosts[worker.number] = worker.host
        self._start_ranks[worker.number] = worker.start_rank
        self._start_by[worker.number] = self.loop.now() + self._start_seconds
        variables = {
            **worker_variables(worker, as_horovod=True),
            "HVDLITE_ELASTIC_DRIVER": self._address,
            "HVDLITE_SECRET": self.secret,
            "HVDLITE_HOST_NAME": worker.host,
        }
        self.start_process(worker, variables)

    def signal(self, number: int, signal_number: int) -> None:
        if number in self.hosts:
            self.end_process(number)

    def tell(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        for number in numbers:
            self._server.send(number, frame)

    # -- what workers say

    def _said(self, number: int, message: list[Any]) -> None:
        self._start_by.pop(number, None)
        self.driver.worker_said(number, message, self.loop.now())

    def _closed(self, number: int) -> None:
        if number in self.hosts:
            self.driver.worker_closed(number, self.loop.now())

    def look(self, now: float) -> None:
        for number, silence in self._server.silence().items():
            if silence >= self._silence_seconds and number in self.hosts:
                why = f"it has not answered for {self._silence_seconds:g} seconds"
                self.driver.worker_lost(number, why, now)
        for number in [number for number, until in self._start_by.items() if now >= until]:
            del self._start_by[number]
            why = f"it has not connected within {self._start_seconds:g} s after its start"
            self.driver.worker_lost(number, why, now)

    # -- the loop

    def run(self) -> Finish:
        """Run to the end; return how it was. No worker runs any more then."""
        try:
            self.driver.tick(self.loop.now())
            while self.finish is None:
                self.driver.tick(self.wait())
                self.carry_out()
            deadline = self.loop.now() + GRACE_SECONDS
            while self.hosts and self.loop.now() < deadline:
                self.wait(deadline)
            self.end_all()
            deadline = self.loop.now() + END_SECONDS
            # A worker whose connection ended before it did would say that the driver has gone.
            while self._server.numbers() and self.loop.now() < deadline:
                self.wait(deadline)
        finally:
            self.close()
        return self.finish

    def drive(self, look: Callable[[], object]) -> Finish:
        """Run in a thread, and call `look` meanwhile, whose errors end the job; see `run`."""
        with ThreadPoolExecutor(1, "hvdlite-driver") as thread:
            end = thread.submit(self.run)
            try:
                while wait([end], LOOK_SECONDS).not_done:
                    look()
            finally:
                self.stop(INTERRUPTED_CODE, "the call was interrupted")
        return end.result()

    def stop(self, code: int, sentence: str) -> None:
        """End the job from outside; any thread may call this."""
        self.loop.post(lambda: self.driver.stop(code, sentence, self.loop.now()))

    def close(self) -> None:
        self.over.set()
        self._server.close()
        self.loop.close()

    # -- the outcome

    def take_results(self, finish: Finish) -> list[Any]:
        """Return the results in rank order of the last world, or raise what ended the job.

        That is the exception of a worker, or `HorovodInternalError` with the driver's sentence.
        """
        if finish.code:
            by_rank = {self._start_ranks[number]: each for number, each in self.raised.items()}
            raise_first(failures_of(by_rank, finish.sentence))
            raise HorovodInternalError(finish.sentence)
        return [self.results.get(number) for number in finish.results]
