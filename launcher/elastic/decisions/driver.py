"""The driver of an elastic job: events come in, commands go out."""

from __future__ import annotations

from typing import Any

from hvdlite.launcher.elastic.decisions.commands import Command
from hvdlite.launcher.elastic.decisions.plan import ElasticPlan


class Driver:
    """Decides who is in which world. Every event has the time `now`, in seconds of any clock.

    After each event, or after several: carry out `take()`, in order, and call `tick` at `due()`.
    Events about hosts and workers that the driver has dropped are ignored, and so is all that
    comes after `Finish`.
    """

    def __init__(self, plan: ElasticPlan, random: Any = None) -> None:
        self.plan = plan
        self._commands: list[Command] = []

    def take(self) -> list[Command]:
        """Return the commands since the last call, in the order in which to carry them out."""
        commands, self._commands = self._commands, []
        return commands

    def due(self) -> float | None:
        """Return when `tick` must be called next, whatever happens; None: not without an event."""
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Let time pass."""

    def discovered(self, hosts: dict[str, int], now: float) -> None:
        """Take the slots of all hosts that are there, in order. No change needs no call."""

    def discovery_failed(self, text: str, now: float) -> None:
        """Note that discovery gave no answer: fatal unless it has given one before."""

    def agent_came(self, host: str, now: float) -> None:
        """Note that the agent of a host can start workers."""

    def agent_lost(self, host: str, why: str, may_return: bool, now: float) -> None:
        """Note that an agent has ended, is silent or could not be started; `why` is a clause.

        Its workers are lost with it. `may_return`: try to start an agent there again.
        """

    def agent_leaving(self, host: str, why: str, now: float) -> None:
        """Note that a host will go: its workers leave at the next commit, as if undiscovered."""

    def worker_said(self, number: int, message: list[Any], now: float) -> None:
        """Take a frame of a worker."""

    def worker_stopped(self, number: int, now: float) -> None:
        """Note that a worker's process is stopped, by SIGSTOP or the like: it is given up."""

    def worker_ended(
        self, number: int, code: int, cause: str | None, by_signal: bool, now: float
    ) -> None:
        """Note that a worker's process has ended.

        `code` is what a shell would show: 128 + N after signal N, and then `by_signal` is true.
        `cause` is what it raised, or how it was killed, as a clause; None: nothing is known.
        """

    def worker_lost(self, number: int, why: str, now: float) -> None:
        """Note that a worker is silent, or its connection has ended; `why` is a clause."""

    def stop(self, code: int, sentence: str, now: float) -> None:
        """End the job from outside, after Ctrl-C for example."""
