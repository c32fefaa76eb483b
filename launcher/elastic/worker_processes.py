"""The workers of an elastic job, and the agents that start them: both come and go as it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdlite.launcher.agents.agent_connection import AgentConnection, AgentHost
from hvdlite.launcher.agents.channel import BEATS, squeeze
from hvdlite.launcher.agents.host_agents import AgentUser, HostAgents
from hvdlite.launcher.agents.job_description import JobDescription
from hvdlite.launcher.command_line.job_kinds import ElasticOptions
from hvdlite.launcher.decisions.commands import StartWorker
from hvdlite.launcher.decisions.driver import Driver
from hvdlite.launcher.decisions.endings import signal_name
from hvdlite.launcher.decisions.lines import tells_of_world
from hvdlite.launcher.elastic.driver_loop import DriverLoop, worker_variables
from hvdlite.launcher.hosts.hosts import Host
from hvdlite.launcher.hosts.ssh import (
    explain_agent,
    explain_silence,
    has_not_answered,
    spell_end,
)
from hvdlite.launcher.jobs.job import Job
from hvdlite.launcher.live.job_view import FAILURE, OTHER, STALL, WORLD


@dataclass
class _Worker:
    agent: AgentConnection
    pid: int = 0  # Of its process group, too; known when it has been started.
    cause: str | None = None  # The exception that it has reported.


class WorkerProcesses:
    """Starts workers by their agents, and tells the driver what becomes of them."""

    def __init__(self, job: Job, description: JobDescription, driver: Driver) -> None:
        self._options, self._output, self._driver = job.options, job.output, driver
        self._description = description
        self._live = job.live
        self._workers: dict[int, _Worker] = {}
        # By the kind of a message. Whatever is said of others than these is too late.
        self._handlers: dict[str, Callable[..., None]] = {
            "started": self._started, "unable": self._unable, "output": self._output.feed,
            "raised": self._raised, "part": description.keep_answer, "exit": self._exit,
            "stall": lambda _, text: job.live.note(STALL, text), "answer": job.live.orders.receive,
        }  # fmt: skip
        # What the driver is told as it is, with the time.
        self._events: dict[str, Callable[..., None]] = {
            "said": driver.worker_said, "silent": driver.worker_lost,
            "closed": driver.worker_closed,
        }  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self._workers)

    # -- commands

    def start(self, worker: StartWorker, agent: AgentConnection) -> None:
        self._workers[worker.number] = _Worker(agent)
        self._output.begin(worker.number, worker.start_rank)
        variables = worker_variables(worker, self._options.as_horovod)
        # By its number, as the start rank may be that of another one on this host, too.
        start = self._description.start(worker.number, worker.slot, variables)
        agent.send("start", worker.number, start)

    def signal(self, number: int, signal_number: int) -> None:
        if number in self._workers:
            self._workers[number].agent.send("signal", int(signal_number), [number])

    def order(self, number: int, line: str) -> None:
        """Give an order to a worker: see connections/order_lines.py."""
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

    def _exit(self, number: int, code: int) -> None:
        cause = self._forget(number)
        if code:
            self._live.note(FAILURE, f"a worker has ended: {cause or f'exit code {code}'}")
        by_signal = code < 0
        if by_signal:
            cause = f"killed by {signal_name(-code)}"
        self._driver.worker_ended(
            number, 128 - code if by_signal else code, cause if code else None, by_signal,
            time.monotonic(),
        )  # fmt: skip


class ElasticWorkers(DriverLoop, AgentUser):
    """Does what the driver wants of agents and workers, and tells it what becomes of them.

    `slots` returns those of a host.
    """

    def __init__(
        self, options: ElasticOptions, job: Job, slots: Callable[[str], int],
        launcher_environ: Mapping[str, str],
    ) -> None:  # fmt: skip
        # So often is looked that the silence of a host is noticed.
        super().__init__(options, job.loop, min(1.0, options.host_timeout_seconds / (2 * BEATS)))
        self._job, self._slots = job, slots
        description = JobDescription(job.options, job.environ, ())
        self.workers = WorkerProcesses(job, description, self.driver)
        start_seconds = job.options.start_timeout_seconds
        self.agents = HostAgents(job, description, launcher_environ, self, start_seconds)

    # -- commands of the driver

    def start_agent(self, host: str) -> None:
        self.agents.add(AgentHost(host, Host(host, 1).remote, tuple(range(self._slots(host)))))
        self.agents.start()

    def drop_agent(self, host: str) -> None:
        """End the agent of a host, which ends its workers; nobody is told of their end."""
        agent = self.agents.present.get(host)
        if agent is not None:
            self.agents.drop(agent, self.workers.forget(agent))

    def start_worker(self, worker: StartWorker) -> None:
        agent = self.agents.present.get(worker.host)
        if agent is not None:  # Else it was lost a moment ago, of which the driver is told next.
            self.workers.start(worker, agent)

    def signal(self, number: int, signal_number: int) -> None:
        self.workers.signal(number, signal_number)

    def tell(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        self.workers.tell(numbers, frame)

    def say(self, line: str) -> None:
        """Print a line of hvdlite-run's own."""
        self._job.live.note(WORLD if tells_of_world(line) else OTHER, line)
        self._job.say(line)

    def signal_all(self, signal_number: int) -> None:
        """Signal all workers, and what is still about to start some."""
        self.agents.stop()
        for agent in list(self.agents.present.values()):
            if agent.folder:
                agent.send("signal", int(signal_number), [])
            else:
                self.drop_agent(agent.host.name)

    def look(self, now: float) -> None:
        self.agents.look(now)

    # -- what becomes of agents

    def supplied(self, agent: AgentConnection) -> None:
        self.driver.agent_came(agent.host.name, time.monotonic())

    def said(self, agent: AgentConnection, kind: str, fields: list[Any]) -> None:
        if kind == "leaving":
            self.driver.agent_leaving(agent.host.name, fields[0], time.monotonic())
        else:
            self.workers.receive(kind, fields)

    def refused(self, agent: AgentConnection, why: str) -> None:
        self.drop_agent(agent.host.name)
        self.driver.agent_lost(agent.host.name, f"it {why}", False, time.monotonic())

    def lost(self, agent: AgentConnection) -> None:
        name, (said, code) = agent.host.name, agent.last_words()
        if not agent.folder:
            why = _cause(name, explain_agent(name, said, code))
        elif agent.host.remote:
            why = f"it has closed its connection: {said or 'its agent has ended'}"
        else:
            why = f"its agent {spell_end(code)}"
        self._lose(agent, why)

    def unstarted(self, agent: AgentConnection, error: Exception) -> None:
        """Do without a host where others train; raise what no job of this host can do without."""
        if not self.workers:
            raise error
        self._lose(agent, f"its agent cannot be started here: {error}")

    def overdue(self, agent: AgentConnection, seconds: float) -> None:
        name = agent.host.name
        text = explain_silence(name, seconds, runs=bool(agent.folder))
        self._lose(agent, _cause(name, text))

    def _lose(self, agent: AgentConnection, why: str) -> None:
        self.agents.clean_up(agent, self._give_up(agent))
        self.agents.start()
        here = not agent.host.remote  # `clean_up` has killed its workers.
        self.driver.agent_lost(agent.host.name, why, True, time.monotonic(), ended=here)

    def silent(self, agent: AgentConnection, seconds: float) -> None:
        """Give up an agent that is silent: it ends its workers itself, if it still runs."""
        self._give_up(agent)
        agent.close()
        self.agents.tidy_later(agent)
        why = f"it {has_not_answered(seconds)}"
        self.driver.agent_lost(agent.host.name, why, True, time.monotonic())

    def _give_up(self, agent: AgentConnection) -> list[int]:
        """Forget an agent and its workers; return their process groups."""
        self.agents.forget(agent)
        return self.workers.forget(agent)

    # -- the end

    def let_end(self) -> None:
        for host in list(self.agents.present):
            self.drop_agent(host)

    def running(self) -> bool:
        return bool(self.agents.present) or self.agents.leaving

    def close(self) -> None:
        """Leave nothing behind."""
        self.agents.stop()
        self.let_end()
        self.agents.close()


def _cause(name: str, sentence: str) -> str:
    """Return why a host cannot be used, from the sentence that says so."""
    return sentence.removeprefix(f"host {name} cannot be used: ")
