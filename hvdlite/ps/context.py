"""The place of this process in its cluster: what `ps.init` finds, for all frameworks."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.base.report_failure import report_uncaught
from hvdlite.common.runtime import basics, lifecycle
from hvdlite.common.runtime.current import this_process
from hvdlite.ps.cluster.settings import ClusterSettings, read_settings
from hvdlite.ps.connections.messages import SCHEDULER, WORKER
from hvdlite.ps.scheduler.running import run_scheduler
from hvdlite.ps.server.running import run_server
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_store import RowStore
from hvdlite.ps.tables.row_table import AddedRows
from hvdlite.ps.tables.updater import Added, Updater
from hvdlite.ps.worker import checkpoints
from hvdlite.ps.worker.worker import Worker

CHANGED = (
    "{} has changed since the last step, as by {}, and not on the servers, whose weights replace "
    "it: load weights before ps.DistributedOptimizer is made, or by ps.load"
)
PREFIX = "raw."  # The tables of users have it before their names.


@dataclass
class Context:
    """What this process is. `worker` is None in a server."""

    settings: ClusterSettings
    worker: Worker | None


class _Held:
    context: Context | None = None


def init() -> None:
    """Take the role that the environment gives: `HVDLITE_ROLE` (see docs/parameter_server.md).

    A worker waits until all servers and workers have come; one that is a rank of a job calls
    `hvd.init` before. In the scheduler this function does not return: the process ends when the
    job does. Raises `ConfigError` for settings that cannot be, and where the cluster refuses it.
    """
    if _Held.context is not None:
        return
    settings = read_settings(os.environ)
    if settings is None:
        raise ConfigError(
            "HVDLITE_ROLE is not set, so this process is in no cluster: start the job with "
            "hvdlite-run --ps-servers 1, or give scheduler, server or worker"
        )
    report_uncaught()
    if settings.role == SCHEDULER:
        run_scheduler(settings)
        sys.exit(0)
    worker = None
    if settings.role == WORKER:
        number = settings.number
        if settings.independent:
            this_process.no_rank = (
                "independent workers have no collectives: they may be lost, and others would wait "
                "for them. Give hvdlite-run --ps-workers mpi, or push to the servers"
            )
        else:
            lifecycle.init()
            number = basics.rank()
        worker = Worker(settings, number=number)
        atexit.register(_leave_at_exit)
    _Held.context = Context(settings, worker)


def current() -> Context:
    """Return the context. Raises ValueError before `init`."""
    if _Held.context is None:
        raise ValueError("the parameter server has not been initialized: call ps.init()")
    return _Held.context


def worker() -> Worker:
    """Return the worker that this process is. Raises ValueError in a server, and before `init`."""
    found = current().worker
    if found is None:
        raise ValueError(
            "this process is a server, which is no worker: here it serves from the first call that "
            "begins a tensor or makes an optimizer, so let only workers come before it (ps.role())"
        )
    return found


def shutdown() -> None:
    """Leave the cluster when the servers have all that this worker has pushed.

    The last worker's call ends the servers and the scheduler.
    """
    context, _Held.context = _Held.context, None
    if context is not None and context.worker is not None:
        context.worker.leave()


def _leave_at_exit() -> None:
    """Let the others go on without a worker whose program has ended without `shutdown`."""
    if _Held.context is not None and _Held.context.worker is not None:
        if _Held.context.worker.failure:
            _Held.context.worker.close()
        else:
            shutdown()


def leave() -> None:
    """Let the other workers go on without this one, which has no more data.

    Returns when the servers have all that it has pushed. In sync, that counts, and the next version
    is made of the others' gradients alone.
    """
    shutdown()


def save(directory: str | os.PathLike[str]) -> None:
    """Let the servers write all that they keep for this worker to a folder, as a checkpoint.

    Each server writes its share of the weights, of the optimizer's state and of the rows of
    embeddings, and server 0 the layout beside them; the folder, which all servers share, is
    replaced as a whole. One worker calls it, between two steps; another one that does so meanwhile
    waits for its turn. In sync, the checkpoint has exactly the steps that this worker has finished,
    and the others wait when they need the next; in the other modes, a server has those that have
    come.

    Raises `OSError`, `ValueError` for a folder with anything else in it, before anything lies on
    the servers and, in sync, in a worker that has come back and makes a step again that some
    servers have, and `HorovodInternalError` where a server is lost for good.
    """
    checkpoints.save(worker(), directory)


def load(directory: str | os.PathLike[str]) -> int:
    """Let the servers go on from a checkpoint of `save`; return the steps that it has finished.

    There may be another number of servers than in the save. All workers call it, after they have
    made the same optimizers, and as often as each other: the first call is carried out for all, and
    each gets the weights. A push is before the load on all servers, which undoes it, or after it on
    all: workers hold their pushes back meanwhile, in sync only from the moment that all servers
    have read. Where one cannot read, nothing has changed. A worker that comes when others have made
    steps with the weights gets those of the servers. `finished_steps` counts on as if nothing had
    been loaded; add what is returned, which is less where this worker has made steps before.

    Raises `FileNotFoundError` where there is no checkpoint, `KeyError` for a table that it lacks,
    `ValueError` for one that is another one here and for a damaged file, `PsRolledBack` where a
    server has lost steps (go on from its `version`, and call it again at this step), and
    `HorovodInternalError` where a server is lost for good.
    """
    return checkpoints.load(worker(), directory)


def scale_servers(servers: int) -> None:
    """Let the cluster have fewer servers: those with the highest numbers end.

    One worker calls it, at any time; what they keep goes to the others between two steps. To have
    one more, start a server with ``HVDLITE_PS_JOIN=1``. Raises `HorovodInternalError` for a number
    below 1 or above the present one, and where tensors are kept whole (``partition="tensor"``).
    """
    worker().scale_servers(servers)


def role() -> str:
    """Return "worker" or "server"."""
    return current().settings.role


def rank() -> int:
    """Return the number of this worker."""
    return worker().number


def server_rank() -> int:
    """Return the number of this server. Raises ValueError in a worker, and where it has none yet.

    It has one from the start where `hvdlite-run` has started it, or `HVDLITE_NODE_NUMBER` is set.
    """
    settings = current().settings
    if settings.role == WORKER:
        raise ValueError("this process is a worker: ps.rank() is its number")
    if settings.number is None:
        raise ValueError("the scheduler gives this server a number when it begins to serve")
    return settings.number


def size() -> int:
    """Return the number of workers."""
    return current().settings.num_workers


def num_servers() -> int:
    """Return the number of servers."""
    return current().settings.num_servers


def barrier() -> None:
    """Wait until all workers have come here."""
    worker().barrier()


# What a server process does in the calls that make workers: it serves, until the job has ended.


def serve(new_updater: Callable[[TableDescription], Updater] | None = None) -> NoReturn:
    """Be a server until all workers have left, then end the process.

    `new_updater` makes what holds the tables of an optimizer. What `ps.push` and `ps.push_rows`
    made a table of is added to.
    """

    def updater_for(described: TableDescription) -> Updater:
        if described.name.startswith(PREFIX):
            return raw_updater(described)
        if new_updater is None:
            raise ValueError(
                f"this server has no optimizer for the table '{described.name}': make the "
                "DistributedOptimizer before the first call of push, pull or start"
            )
        return new_updater(described)

    run_server(current().settings, updater_for)
    sys.exit(0)


def raw_updater(described: TableDescription) -> Updater:
    """Return what adds pushes up."""
    rows = described.rows
    return Added() if rows is None else AddedRows(new_store(described))


def new_store(described: TableDescription) -> RowStore:
    """Return memory for the rows of a table that this server keeps."""
    assert described.rows is not None
    return RowStore(described.name, described.rows.spec)
