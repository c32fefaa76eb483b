"""The workers of an elastic job that have not ended, and what their agents say of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdlite.launcher.agents.agent_connection import AgentConnection
from hvdlite.launcher.agents.channel import squeeze
from hvdlite.launcher.agents.job_description import JobDescription
from hvdlite.launcher.decisions.commands import StartWorker
from hvdlite.launcher.decisions.driver import Driver
from hvdlite.launcher.elastic.driving import worker_variables
from hvdlite.launcher.jobs.job import Job
from hvdlite.launcher.live.job_view import FAILURE, STALL


@dataclass
class _Worker:
    agent: AgentConnection
    pid: int = 0  # Of its process group, too; known when it has been started.
    cause: str | None = None  # The exception that it has reported.


class WorkerProcesses:
    """Starts workers by their agents, and tells the driver what becomes of them."""

    def __init__(self, job: Job, description: JobDescription, driver: Driver) -> None:
        self._options, self._output, self._driver = job.options, job.output, driver
        self._live = job.live
        self._workers: dict[int, _Worker] = {}
        # By the kind of a message. Whatever is said of others than these is too late.
        self._handlers: dict[str, Callable[..., None]] = {
            "started": self._started, "unable": self._unable, "output": self._output.feed,
            "raised": self._raised, "part": description.keep_answer, "exit": self._exit,
            "stall": self._stall, "answer": job.live.orders.receive,
        }  # fmt: skip
        # What the driver is told as it is, with the time.
        self._events: dict[str, Callable[..., None]] = {
            "said": driver.worker_said, "stopped": driver.worker_stopped,
            "silent": driver.worker_lost, "closed": driver.worker_closed,
        }  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self._workers)

    # -- commands

    def start(self, worker: StartWorker, agent: AgentConnection) -> None:
        self._workers[worker.number] = _Worker(agent)
        self._output.begin(worker.number, worker.start_rank)
        agent.send("start", worker.number, {
            "rank": worker.number,  # The start rank may be that of another one on this host, too.
            "local_rank": worker.slot,
            "command": list(self._options.command),
            "variables": worker_variables(worker, self._options.as_horovod),
            "terminals": {},
        })  # fmt: skip

    def signal(self, number: int, signal_number: int) -> None:
        if number in self._workers:
            self._workers[number].agent.send("signal", int(signal_number), [number])

    def order(self, number: int, line: str) -> None:
        """Give an order to a worker: see connections/orders.py."""
        if number in self._workers:
            self._workers[number].agent.send("order", number, line)

    def tell(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        by_agent: dict[AgentConnection, list[int]] = {}
        for number in numbers:
            if number in self._workers:
                by_agent.setdefault(self._workers[number].agent, []).append(number)
        data = squeeze(frame)
        for agent, present in by_agent.items():
            agent.send_data("tell", present, data=data)

    def forget(self, agent: AgentConnection) -> list[int]:
        """Forget the workers of an agent without an event; return their process groups."""
        numbers = [number for number, worker in self._workers.items() if worker.agent is agent]
        groups = [self._workers[number].pid for number in numbers]
        for number in numbers:
            self._forget(number)
        return [group for group in groups if group]

    def _forget(self, number: int) -> str | None:
        """Forget a worker; return the exception that it has ended by."""
        worker = self._workers.pop(number)
        printed = self._output.end(number)
        return worker.cause or printed

    # -- what agents say

    def receive(self, kind: str, fields: list[Any]) -> None:
        """Take a message of an agent that is about a worker."""
        if kind in self._handlers and fields[0] in self._workers:
            self._handlers[kind](*fields)
        elif kind in self._events and fields[0] in self._workers:
            self._events[kind](*fields, time.monotonic())

    def _started(self, number: int, pid: int) -> None:
        self._workers[number].pid = pid

    def _unable(self, number: int, why: str) -> None:
        self._forget(number)
        self._driver.worker_refused(number, why, time.monotonic())

    def _raised(self, number: int, words: str) -> None:
        kind, _, cause = words.partition(" ")
        self._workers[number].cause = cause
        if kind == "own":  # A victim may say so before the end of the culprit is known.
            self._driver.worker_raised(number, cause, time.monotonic())

    def _stall(self, _number: int, text: str) -> None:
        self._live.note(STALL, text)

    def _exit(self, number: int, code: int) -> None:
        cause = self._forget(number)
        if code:
            self._live.note(FAILURE, f"a worker has ended: {cause or f'exit code {code}'}")
        by_signal = code < 0
        if by_signal:
            cause = f"killed by {_signal_name(-code)}"
        self._driver.worker_ended(
            number, 128 - code if by_signal else code, cause if code else None, by_signal,
            time.monotonic(),
        )  # fmt: skip


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # One of the real-time signals.
        return f"signal {number}"
