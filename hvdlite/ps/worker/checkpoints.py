"""`ps.save` and `ps.load`, as a worker leads the servers through them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hvdlite.ps.connections import system
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.scheduler.checkpoint_order import LOAD, SAVE
from hvdlite.ps.server.checkpoints import ERRORS
from hvdlite.ps.worker.ordered_operations import MovedError
from hvdlite.ps.worker.shard import PsRolledBack
from hvdlite.ps.worker.table_shards import TableShards
from hvdlite.ps.worker.worker import Worker

LOOK_SECONDS = 0.1  # Until servers are asked again that have moved tables, or come again.
MOST_READS = 20  # Where each server reads another checkpoint.

Answers = list[Mapping[str, Any]]


class _AgainError(Exception):
    """All phases are to be made anew: a server has moved tables meanwhile, or has come again.

    Or one has read another checkpoint.
    """


class _OvertakenError(Exception):
    """Another worker has had its turn since: the scheduler was lost, and knew of none."""


def save(worker: Worker, directory: str | os.PathLike[str]) -> None:
    """Let all servers write the tables of a worker; see `hvdlite.ps.context.save`."""
    _in_turn(worker, _tables_of(worker, "saved"), SAVE, directory)


def load(worker: Worker, directory: str | os.PathLike[str]) -> int:
    """Let all servers read the tables of a worker; see `hvdlite.ps.context.load`."""
    tables = _tables_of(worker, "loaded")
    late = not worker.loads and any(table.entered_at > 0 for table in tables.values())
    answer = _in_turn(worker, tables, LOAD, directory, late=late)
    for table in tables.values():  # A server was lost amid it, after all had said where they stand.
        table.raise_if_rolled_back()
    worker.loads = answer["loads"] if late else worker.loads + 1
    for name, table in tables.items():
        before, of_workers = answer["steps"].get(name, (0, ()))
        table.steps_before = dict(of_workers).get(worker.number, before)
        table.refresh()
    return max(table.steps_before for table in tables.values())


def _in_turn(
    worker: Worker, tables: Mapping[str, TableShards], what: str,
    directory: str | os.PathLike[str], *, late: bool = False,
) -> Mapping[str, Any]:  # fmt: skip
    """Save when it is this worker's turn; load then, unless another worker has done it for all.

    Return what the scheduler has said last.
    """
    while True:
        body = {"what": what, "number": worker.loads + 1, "late": late}
        answer = worker.ask(Message("turn", body=body)).body
        if not (turn := answer["turn"]):
            return answer
        if what == LOAD:
            worker.loads = answer["loads"]
        try:
            _make(worker, tables, what, answer, directory)
            if what == SAVE:
                return answer
        except _OvertakenError:
            continue
        except PsRolledBack:
            for table in tables.values():  # Their values are those of steps that are lost.
                table.renew()
            raise
        finally:
            worker.ask(Message("over", body={"turn": turn, "load": None}))


def _tables_of(worker: Worker, done: str) -> dict[str, TableShards]:
    if not worker.named:
        raise ValueError(
            f"nothing can be {done} yet: make the DistributedOptimizer, or call start, before"
        )
    return dict(worker.named)


def _make(
    worker: Worker, tables: Mapping[str, TableShards], what: str, answer: Mapping[str, Any],
    directory: str | os.PathLike[str],
) -> None:  # fmt: skip
    """Make all phases, and again from the first one where servers change in between."""
    repeat = 0
    while True:
        for table in tables.values():  # They are not where their user takes them to be.
            table.raise_if_rolled_back()
            table.raise_if_failed()  # Other servers wait for steps that are made no more.
        attempt = [answer["turn"], repeat]
        phases = _Phases(worker, tables, what, attempt, os.path.abspath(directory))
        try:
            if what == SAVE:
                return phases.save()
            return phases.load(answer["clocks"])
        except (_AgainError, MovedError):
            repeat += 1
            system.sleep(LOOK_SECONDS)
        except _OvertakenError:
            raise
        except Exception:
            if what == SAVE:
                with suppress(Exception):
                    phases.run("discard", only_first=True)
            raise


class _Phases:
    """One attempt, with the servers that keep the tables now."""

    def __init__(
        self, worker: Worker, tables: Mapping[str, TableShards], what: str,
        attempt: Sequence[int], directory: str,
    ) -> None:  # fmt: skip
        self._worker, self._what = worker, what
        self._attempt, self._directory = [*attempt], directory
        self._layout, self._servers = next(iter(tables.values())).place
        self._tables = [
            [name, table.clock, table.is_whole, table.steps_before]
            for name, table in tables.items()
        ]
        self._named = tables

    def save(self) -> None:
        self.run("begin", tables=self._tables)
        written = self.run("write", servers=self._servers)
        self.run("commit", only_first=True, tables=self._tables, written=written)

    def load(self, said: Iterable[tuple[int, Mapping[str, int]]]) -> None:
        """Read the tables, and let all servers have them when the scheduler has taken note of it.

        `said` has the steps at which the workers stand.
        """
        answers = self.run("read", tables=self._tables, servers=self._servers)
        if len({answer["digest"] for answer in answers}) > 1:
            if self._attempt[1] < MOST_READS:
                raise _AgainError
            raise ValueError(
                f"servers read different checkpoints from {self._directory}: it is no folder that "
                "all hosts share, or others save to it again and again: give each job its own"
            )
        clocks = self._clocks_of_all(said, answers)
        steps = {
            name: (
                steps - self._named[name].clock,
                [(worker, steps - clock) for worker, clock in clocks[name][1]],
            )
            for name, steps in answers[0]["steps"].items()
        }
        load = {
            "turn": self._attempt[0], "directory": self._directory, "layout": self._layout,
            "servers": self._servers, "clocks": clocks, "steps": steps,
            "digest": answers[0]["digest"],
        }  # fmt: skip
        over = Message("over", body={"turn": load["turn"], "load": load})
        pause = 0.0
        while not self._worker.ask(over).body["over"]:
            system.sleep(pause)
            # They hear of it anyway, but later; and this fails where one is lost for good.
            self.run("apply", load=load)
            pause = LOOK_SECONDS

    def _clocks_of_all(
        self, said: Iterable[tuple[int, Mapping[str, int]]], answers: Answers
    ) -> dict[str, tuple[int, list[tuple[int, int]]]]:
        """Return the least version of each table, and where all servers are to have the workers.

        A worker that has come again makes the steps again that some servers have. It may not have
        said so yet: it begins at the lowest step that servers know of it. In sync, all make the
        update after the version.
        """
        found: dict[str, tuple[int, list[tuple[int, int]]]] = {}
        for name, table in self._named.items():
            if table.is_sync:
                found[name] = table.clock, []
                continue
            clocks: dict[int, int] = {}
            for worker, clock in [each for answer in answers for each in answer["clocks"][name]]:
                clocks[worker] = min(clock, clocks.get(worker, clock))
            clocks |= {worker: clocks_of[name] for worker, clocks_of in said if name in clocks_of}
            found[name] = 0, sorted(clocks.items())
        return found

    def run(self, phase: str, *, only_first: bool = False, **body: Any) -> Answers:
        """Let all servers, or server 0 alone, make a phase; return what they say."""
        words = {"attempt": self._attempt, "phase": phase, "directory": self._directory, **body}
        message = Message(self._what, incarnation=self._layout, body=words)
        answers = self._worker.ask_servers(1 if only_first else self._servers, message)
        for server, answer in enumerate(answers):
            if answer.kind == "failed":
                kinds = {kind.__name__: kind for kind in ERRORS}
                kind = kinds.get(answer.body.get("error", ""), ValueError)
                raise kind(f"server {server}: {answer.body['why']}")
        if any(answer.kind == "overtaken" for answer in answers):
            raise _OvertakenError
        if any(answer.kind in ("moved", "restarted") for answer in answers):
            raise _AgainError
        return [answer.body for answer in answers]
