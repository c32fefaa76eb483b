"""`ps.save` and `ps.load`, as a worker leads the servers through them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hvdlite.ps.connections import outside
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.scheduler.checkpoint_order import LOAD, SAVE
from hvdlite.ps.server.checkpoints import remote_error
from hvdlite.ps.worker.ordered_operations import MovedError
from hvdlite.ps.worker.table_shards import TableShards
from hvdlite.ps.worker.worker import Worker

LOOK_SECONDS = 0.1  # Until servers are asked again that have moved tables, or come again.

Answers = list[Mapping[str, Any]]
# Of each table: what is to be added to the steps that a worker counts, and to those of others which
# have made more or fewer.
Steps = dict[str, tuple[int, Sequence[tuple[int, int]]]]


class _AgainError(Exception):
    """A server has moved tables meanwhile, or has come again: all phases are to be made anew.

    One that has come again after its last phase has lost what it had loaded: the scheduler says so.
    """


class _OvertakenError(Exception):
    """Another worker has had its turn since: the scheduler was lost, and knew of none."""


def save(worker: Worker, directory: str | os.PathLike[str]) -> None:
    """Let all servers write the tables of a worker; see `hvdlite.ps.context.save`."""
    _in_turn(worker, _tables_of(worker, "saved"), {"what": SAVE}, directory)


def load(worker: Worker, directory: str | os.PathLike[str]) -> int:
    """Let all servers read the tables of a worker; see `hvdlite.ps.context.load`."""
    tables = _tables_of(worker, "loaded")
    late = not worker.loads and any(table.entered_at > 0 for table in tables.values())
    number = worker.loads + 1
    answer, steps = _in_turn(
        worker, tables, {"what": LOAD, "number": number, "late": late}, directory
    )
    if steps is not None:
        worker.loads += 1
    else:  # Another worker has done it for all.
        worker.loads, steps = answer["loads"] if late else number, answer["steps"]
    for name, table in tables.items():
        before, of_workers = steps.get(name, (0, ()))
        table.steps_before = dict(of_workers).get(worker.number, before)
        table.refresh()
    return max(table.steps_before for table in tables.values())


def _in_turn(
    worker: Worker, tables: Mapping[str, TableShards], body: Mapping[str, Any],
    directory: str | os.PathLike[str],
) -> tuple[Mapping[str, Any], Steps | None]:  # fmt: skip
    """Save or load when it is this worker's turn; return what the scheduler and servers have said.

    The servers say nothing where it has nothing to do.
    """
    loads = body["what"] == LOAD
    while True:
        answer, steps = worker.ask(Message("turn", body=body)).body, None
        if not (turn := answer["turn"]):
            return answer, None
        if loads:
            worker.loads = answer["loads"]
        try:
            steps = _make(worker, tables, body["what"], answer, directory)
            return answer, steps
        except _OvertakenError:
            continue
        finally:
            worker.ask(Message("over", body={"turn": turn, "steps": None}))


def _tables_of(worker: Worker, done: str) -> dict[str, TableShards]:
    if not worker.named:
        raise ValueError(
            f"nothing can be {done} yet: make the DistributedOptimizer, or call start, before"
        )
    return dict(worker.named)


def _make(
    worker: Worker, tables: Mapping[str, TableShards], what: str, answer: Mapping[str, Any],
    directory: str | os.PathLike[str],
) -> Steps:  # fmt: skip
    """Make all phases, and again from the first one where servers change in between."""
    repeat = 0
    while True:
        attempt = [answer["turn"], repeat]
        phases = _Phases(worker, tables, what, attempt, os.path.abspath(directory))
        try:
            return phases.save() if what == SAVE else phases.load(answer["clocks"])
        except (_AgainError, MovedError):
            repeat += 1
            outside.sleep(LOOK_SECONDS)
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

    def save(self) -> Steps:
        self.run("begin", tables=self._tables)
        written = self.run("write", servers=self._servers)
        self.run("commit", only_first=True, tables=self._tables, written=written)
        return {}

    def load(self, said: Iterable[tuple[int, Mapping[str, int]]]) -> Steps:
        """Read the tables, and let all servers have them; return the steps before their steps.

        `said` has the steps at which the workers stand.
        """
        answers = self.run("read", tables=self._tables, servers=self._servers)
        clocks = self._clocks_of_all(said, answers)
        self.run("apply", clocks=clocks)
        steps_before: Steps = {
            name: (
                steps - self._named[name].clock,
                [(worker, steps - clock) for worker, clock in clocks[name]],
            )
            for name, steps in answers[0]["steps"].items()
        }
        over = Message("over", body={"turn": self._attempt[0], "steps": steps_before})
        if not self._worker.ask(over).body["loaded"]:
            raise _AgainError
        return steps_before

    def _clocks_of_all(
        self, said: Iterable[tuple[int, Mapping[str, int]]], answers: Answers
    ) -> dict[str, list[tuple[int, int]]]:
        """Return where all servers are to have the workers, which hold their pushes back.

        A worker that has come again makes the steps again that some servers have. It may not have
        said so yet: it begins at the lowest step that servers know of it. In sync nobody holds
        pushes back, and all make the next update.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        for name, table in self._named.items():
            if table.is_sync:
                found[name] = []
                continue
            clocks: dict[int, int] = {}
            for worker, clock in [each for answer in answers for each in answer["clocks"][name]]:
                clocks[worker] = min(clock, clocks.get(worker, clock))
            clocks |= {worker: clocks_of[name] for worker, clocks_of in said if name in clocks_of}
            found[name] = sorted(clocks.items())
        return found

    def run(self, phase: str, *, only_first: bool = False, **body: Any) -> Answers:
        """Let all servers, or server 0 alone, make a phase; return what they say."""
        words = {"attempt": self._attempt, "phase": phase, "directory": self._directory, **body}
        message = Message(self._what, incarnation=self._layout, body=words)
        answers = self._worker.ask_servers(1 if only_first else self._servers, message)
        for server, answer in enumerate(answers):
            if answer.kind == "failed":
                raise remote_error(server, answer.body)
        if any(answer.kind == "overtaken" for answer in answers):
            raise _OvertakenError
        if any(answer.kind in ("moved", "restarted") for answer in answers):
            raise _AgainError
        return [answer.body for answer in answers]
