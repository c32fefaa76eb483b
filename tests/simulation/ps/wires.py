"""The connections of a parameter server that prove themselves: the real ones, upon sockets.

The callers, listeners, links and loops of the nodes are those of the product, and so is what both
ends prove to each other. Strangers come as well, who do not know the token of the cluster.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections import channel
from hvdlite.ps.connections.messages import SERVER, WORKER, Message, pack
from hvdlite.ps.server import running as server_running
from hvdlite.ps.server.running import run_server
from hvdlite.ps.worker.worker import Worker
from tests.simulation.ps.nodes import here
from tests.simulation.ps.oracle import new_updater
from tests.simulation.start.net import Host, Net
from tests.simulation.start.net import Node as Descriptors
from tests.simulation.start.outside import connections
from tests.simulation.start.programs import Visitor
from tests.simulation.start.visitors import STRANGERS, Guest
from tests.simulation.world import BrokenError, Process

if TYPE_CHECKING:
    from tests.simulation.ps.cluster import Cluster
    from tests.simulation.ps.job import PsJob

SCHEDULER_PORT, WINDOW = 4242, 1 << 16


class Wires(Net):
    """The hosts of a cluster, one for each node, whose name it has."""

    def __init__(self, cluster: Cluster, latency: float, bytes_per_second: float) -> None:
        super().__init__(cluster.world, 0, latency, bytes_per_second, WINDOW)
        self._cluster, self._bytes_per_second = cluster, bytes_per_second
        self._by_name: dict[str, Host] = {}

    def host(self, name: str) -> Host:
        if name not in self._by_name:
            self._by_name[name] = Host(len(self.hosts), self._bytes_per_second)
            self.hosts.append(self._by_name[name])
        return self._by_name[name]

    def listener_at(self, address: object, caller: Descriptors) -> Any:
        found = super().listener_at(address, caller)
        cut = found is not None and self._cluster.are_cut(caller, found.node)
        return None if cut else found

    def fail(self, process: Process | None, error: BaseException) -> None:
        super().fail(process, error)
        self._cluster.failure = self._cluster.failure or self.failure

    def cut(self, one: Descriptors, other: Descriptors) -> None:
        super().cut(one, other)
        super().cut(other, one)


def stand_ins(net: Wires) -> list[tuple[Any, str, Any]]:
    """Return what is outside of connections."""
    return [
        *connections(net), (channel, "pack", _pack), (channel, "SharedMemory", _no_memory),
        (server_running, "address_towards", lambda _scheduler: here.task.node.host.address),
    ]  # fmt: skip


def _no_memory() -> None:
    raise OSError("no memory is shared")


def _pack(message: Message) -> Any:
    """Pack a message that is sent, of which others take note."""
    node = here.task.node
    node.cluster.world.tell(node.name, f"{message.kind} {message.table} {message.clock} ->")
    node.cluster.on_send(node.name, message.kind)
    return pack(message)


def come(job: PsJob, settings: ClusterSettings, visitor: Visitor) -> None:
    """Let somebody come who does not know the token."""
    net = job.cluster.net
    assert net is not None
    name = f"stranger {visitor.at:.6f}"
    if visitor.kind not in (SERVER, WORKER):
        Guest(net, visitor, net.host(name))
        return
    theirs = replace(
        settings, role=visitor.kind, node_id=name, number=0, token=b"another secret",
        start_seconds=visitor.seconds,
    )  # fmt: skip
    node = job.cluster.node(name, is_stranger=True)
    node.ended = partial(_check_refused, job, name)
    if visitor.kind == WORKER:
        node.start(lambda: Worker(theirs, number=0).leave())
    else:
        node.start(partial(run_server, theirs, lambda _described: new_updater(job.program)))


def _check_refused(job: PsJob, name: str, error: BaseException | None) -> None:
    job.world.tell(name, f"ends: {error}")
    if not isinstance(error, ConfigError) and not job.leaves:
        job.cluster.fail_by(BrokenError(STRANGERS, f"{name} ends with {error!r}"))
