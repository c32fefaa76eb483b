"""What is outside of a rank that meets others: time, sockets, and what shows where it runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.networks import Interface
from hvdlite.common.connections import address, link, liveness, loop, prove
from hvdlite.common.decisions.control_tree import Tree
from hvdlite.common.meeting import client, meet, start_wait
from hvdlite.common.runtime import connect
from hvdlite.common.transport import bootstrap
from hvdlite.common.transport.base import Incoming
from hvdlite.common.transport.rendezvous import TOKEN_BYTES
from hvdlite.common.transport.tcp import addresses, control, transport
from hvdlite.common.transport.tcp import connect as tcp
from tests.simulation.start.epolls import Epoll, Event
from tests.simulation.start.net import Memory, Net, Node, here
from tests.simulation.start.sockets import Socket
from tests.simulation.world import Action, KilledThread, Process, in_a_thread, in_place


def start_process(node: Node, name: str, main: Action) -> None:
    """Run `main` in a process of the world, as a thread of a node."""
    process = node.net.world.process(name)
    process.end_of_killed = KilledThread
    node.processes.append(process)

    def run() -> None:
        here.node, here.process = node, process
        try:
            main()
        except KilledThread:
            pass
        except BaseException as error:
            node.net.fail(process, error)
        process.end()

    def begin() -> None:
        if not process.killed:
            process.begin(partial(in_a_thread, run))

    node.net.world.after(0.0, begin)


class Thread:
    """Has the methods of `threading.Thread`."""

    def __init__(self, target: Action, name: str, daemon: bool) -> None:
        self._target, self._name = target, name
        self._ended = False
        self._joins: Process | None = None

    def start(self) -> None:
        start_process(here.node, self._name, self._run)

    def _run(self) -> None:
        self._target()
        self._ended = True
        if self._joins is not None:
            self._joins.poke()

    def join(self) -> None:
        self._joins = here.process
        self._joins.sleep_until(lambda: self._ended)


class MeetingFolder(SimpleNamespace):
    """Has the methods of `rendezvous.MeetingFolder`: a folder, in which ranks of a host meet."""

    def __init__(self, directory: str, token: bytes) -> None:
        super().__init__(directory=directory, token=token)

    @classmethod
    def new(cls, _folder: str | None = None) -> MeetingFolder:
        directory = f"/tmp/hvdlite-{here.node.net.new_port():08d}"
        here.node.folders.add(directory)
        return cls(directory, bytes(TOKEN_BYTES))

    def close(self) -> None:
        here.node.folders.discard(self.directory)


def listen_locally(meeting: MeetingFolder, rank: int) -> Socket:
    listener = new_socket(socket.AF_UNIX)
    listener.bind(f"{meeting.directory}/{rank}")
    listener.listen()
    return listener


def meet_locally(
    meeting: MeetingFolder, listener: Socket, rank: int, peers: tuple[int, ...], _memory: int,
    deadline: float, _interrupt: object = None,
) -> dict[int, object]:  # fmt: skip
    """Wait for the ranks of this host, whose connections are not made."""
    net, host, process = here.node.net, here.node.host, here.process
    come = net.come.setdefault(meeting.directory, {})
    come[rank] = process

    def gone() -> list[int]:
        return [each for each in peers if each not in come
                and (host, f"{meeting.directory}/{each}") not in net.listening]  # fmt: skip

    for other in come.values():
        other.poke()
    with listener:
        while not all(each in come for each in peers):
            left = deadline - net.world.clock()
            if gone() or left <= 0:
                raise HorovodInternalError(f"rank {peers[0]} does not answer on its socket")
            process.sleep_until(lambda: all(each in come for each in peers), min(left, 0.05))
    return {}


class Mesh:
    """Has what `TcpTransport` uses of a `LocalMesh`."""

    signal = gone = shared = short_call_memory = None

    def __init__(self, _rank: int, _links: object, memory: int) -> None:
        self.poller = loop.Loop()
        self.incoming: list[Incoming] = []
        self.woken = self.news = False
        self._memory = memory

    def wake(self, within: float = 0.0) -> None:
        """Nobody waits."""

    def take(self) -> list[Incoming]:
        messages, self.incoming[:] = [*self.incoming], []
        return messages

    def drain(self, _timeout: float) -> None:
        """All has gone."""

    def close(self) -> None:
        self.poller.close()
        close_number(self._memory)


def close_number(number: int) -> None:
    here.node.open.pop(number, None)


def new_socket(family: int = socket.AF_INET, _kind: int = 0) -> Socket:
    return Socket(here.node.net, here.node, family).opened()


def create_server(place: tuple[str, int], *, family: int = socket.AF_INET, **_: Any) -> Socket:
    listener = new_socket(family)
    try:
        listener.bind((place[0] or here.node.host.address, place[1]))
    except OSError:
        listener.close()
        raise
    listener.listen()
    return listener


def _look_up(name: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
    for host in here.node.net.hosts:
        if name in (host.name, host.address):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host.address, port))]
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def _ioctl(number: int, _request: int, _buffer: bytes) -> bytes:
    if not here.node.lives:
        raise KilledThread
    connection = here.node.open[number]
    assert isinstance(connection, Socket)
    return connection.unconfirmed.to_bytes(4, "little")


def _interfaces() -> list[Interface]:
    return [Interface("lo", "127.0.0.1", 8, loopback=True),
            Interface("eth0", here.node.host.address, 24)]  # fmt: skip


def _machine() -> bytes:
    return here.node.host.name.encode()


_NAMES = {name: each for name, each in vars(socket).items() if not name.startswith("__")}
SOCKETS = SimpleNamespace(**_NAMES | {
    "socket": new_socket, "create_server": create_server, "getaddrinfo": _look_up,
    "has_dualstack_ipv6": lambda: False,
})  # fmt: skip


def clock_of(net: Net) -> Any:
    """Return what takes the place of `time`."""
    return SimpleNamespace(
        monotonic=net.world.clock, strftime=lambda _form: "00:00:00",
        sleep=lambda seconds: here.process.sleep_until(lambda: False, seconds),
    )  # fmt: skip


def connections(net: Net) -> list[tuple[Any, str, Any]]:
    """Return what is outside of connections, and of the loops that see to them."""
    return [
        *((each, "time", clock_of(net)) for each in (loop, liveness)),
        (loop, "select", SimpleNamespace(epoll=Epoll)), (loop, "_Event", Event),
        (loop, "socket", SOCKETS), (address, "socket", SOCKETS),
        (link, "fcntl", SimpleNamespace(ioctl=_ioctl)),
        (prove, "os", SimpleNamespace(urandom=net.nonces.randbytes)),
    ]  # fmt: skip


@contextmanager
def around(net: Net, fan_out: int) -> Iterator[None]:
    """Be what is outside of ranks that meet."""
    clock = clock_of(net)
    environ = SimpleNamespace(get=lambda name, default=None: here.node.environ.get(name, default))
    files = SimpleNamespace(close=close_number, fsencode=os.fsencode, fsdecode=os.fsdecode)
    replaced: list[tuple[Any, str, Any]] = [
        *connections(net), (tcp, "socket", SOCKETS),
        *((each, "time", clock) for each in (
            client, start_wait, meet, connect, tcp, control, transport,
        )),
        (meet, "threading", SimpleNamespace(Thread=Thread)),
        (connect, "os", SimpleNamespace(environ=environ)),
        (addresses, "os", SimpleNamespace(environ=environ, urandom=net.world.lot.randbytes)),
        (connect, "host_identity", lambda: here.node.host.name),
        (connect, "has_fabric", lambda: False),
        (connect, "neighbours", lambda topology, rank: Tree(topology, rank, fan_out).neighbours),
        (tcp, "list_interfaces", _interfaces), (addresses, "list_interfaces", _interfaces),
        (tcp, "_machine", _machine),
        (bootstrap, "os", files), (bootstrap, "MeetingFolder", MeetingFolder),
        (bootstrap, "listen", listen_locally), (bootstrap, "meet", meet_locally),
        (bootstrap, "create_memory", lambda: here.node.take(Memory())),
        (bootstrap, "LocalMesh", Mesh),
    ]  # fmt: skip
    with in_place(replaced):
        yield
