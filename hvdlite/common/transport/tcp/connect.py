"""Connect the ranks of a job over TCP."""

from __future__ import annotations

import errno
import hashlib
import hmac
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import msgpack

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.networks import Interface, list_interfaces
from hvdlite.common.base.topology import Topology
from hvdlite.common.connections.dial import Limits
from hvdlite.common.connections.liveness import Liveness
from hvdlite.common.connections.loop import READ, Loop
from hvdlite.common.meeting.exchange import Exchange, Interrupt
from hvdlite.common.meeting.placement import THREAD_NETWORK, boot_id, network_namespace
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.bootstrap import Gathering, exchange_versions, raise_first
from hvdlite.common.transport.tcp.addresses import (
    AddressBook,
    Card,
    Endpoint,
    choose,
    exchange_cards,
)
from hvdlite.common.transport.tcp.connections import Connections, Identity
from hvdlite.common.transport.tcp.transport import Job, TcpTransport

Neighbours = Callable[[Topology, int], Iterable[int]]
MACHINE_BYTES = 16
BACKLOG = 1024
LOOPBACK = "127.0.0.1"
# An address that is not ready yet, or on its way out, cannot be bound: others may do.
NOT_READY = (errno.EADDRNOTAVAIL, errno.ENODEV)


class Known(NamedTuple):
    """What the ranks of a job know before they meet, which saves rounds of their meeting."""

    hosts: Sequence[str]  # That of each rank; equal ones share memory.
    greeting: bytes = b""  # For all other ranks.
    # Called with the greetings of all ranks, in rank order.
    heard: Callable[[list[bytes]], None] = lambda greetings: None


def connect(
    exchange: Exchange,
    config: Config,
    deadline: float,
    neighbours: Neighbours,
    *,
    host: str,
    secret: bytes = b"",
    epoch: int = 0,
    interrupt: Interrupt | None = None,
    folder: str | None = None,
    known: Known | None = None,
) -> TcpTransport:
    """Return the transport of this rank; collective over the ranks of `exchange`.

    `neighbours(topology, rank)` are the ranks with which a rank exchanges control messages: these
    are connected at once, others at first use. Ranks with the same `host` share memory. `secret` is
    what the ranks of the job know and others do not; `epoch` tells a job that has started again
    from the one before. `interrupt` ends all waits when a rank is lost; the ranks of a host meet in
    `folder`. Ranks that know each other's hosts already say so by `known`, all of them or none.
    Raises `HorovodInternalError` when ranks are not connected by `deadline` (monotonic seconds),
    and `HorovodVersionMismatchError`.
    """
    with ExitStack() as stack:
        if known is not None:
            hosts = known.hosts
        else:
            hosts = [name.decode() for name in exchange_versions(exchange, host.encode())]
        with Gathering(exchange.rank, hosts, folder) as gathering:
            _invite(exchange, gathering, known)
            topology, one_machine = _find_hosts(exchange, gathering, several=len(set(hosts)) > 1)
            failure = gathering.meet(deadline, interrupt)
            card, listeners = _listen(exchange.rank, topology, one_machine, config, stack)
            cards = exchange_cards(exchange, card, failure)
            mesh = gathering.take_mesh()
        stack.callback(mesh.close)
        key = hmac.new(secret, cards[0].nonce, hashlib.sha256).digest()
        connections = Connections(
            mesh.poller,
            Identity(exchange.rank, exchange.size, epoch, key),
            listeners,
            AddressBook(topology.peers(exchange.rank), cards).targets,
            Limits(config.peer_timeout_seconds, config.start_timeout_seconds),
        )
        job = Job(exchange.rank, topology, [each.host for each in cards], cards[0].streams)
        liveness = Liveness(mesh.poller, config.peer_timeout_seconds)
        transport = TcpTransport(job, mesh, connections, liveness)
        stack.pop_all()
        stack.callback(transport.close)
        if len(topology.hosts) > 1:
            needed = set(neighbours(topology, exchange.rank)) - {*topology.peers(exchange.rank)}
            # Whoever dials has failed by then, unless it is connected.
            patience = time.monotonic() + 2 * config.peer_timeout_seconds
            with _interrupted_by(interrupt, mesh.poller):
                _connect_neighbours(exchange, transport, needed, min(deadline, patience))
        stack.pop_all()
    return transport


@contextmanager
def _interrupted_by(interrupt: Interrupt | None, poller: Loop) -> Iterator[None]:
    """Let waits of `poller` raise as `interrupt` does within this context."""
    if interrupt is None:
        yield
        return
    descriptor = interrupt.fileno()
    poller.watch(descriptor, READ, lambda events: interrupt.raise_if_over())
    try:
        yield
    finally:
        poller.forget(descriptor)


def _invite(exchange: Exchange, gathering: Gathering, known: Known | None) -> None:
    """Let the ranks of each host know where they meet: by the first round if all is `known`."""
    if known is None:
        gathering.listen(exchange.allgather(gathering.invite()))
        return
    packed = msgpack.packb([known.greeting, gathering.invite()])
    bodies = [msgpack.unpackb(body) for body in exchange_versions(exchange, packed)]
    gathering.listen([invitation for _, invitation in bodies])
    known.heard([greeting for greeting, _ in bodies])


def _find_hosts(
    exchange: Exchange, gathering: Gathering, *, several: bool
) -> tuple[Topology, bool]:
    """Return the topology, and whether all hosts of it are simulated by one machine.

    `several`: the ranks have given the names of more than one host.
    """
    machine = _machine() if several else b""
    answers = exchange.allgather(gathering.answer + machine)
    topology = gathering.split([answer[:1] for answer in answers])
    machines = {answer[1:] for answer in answers}
    if len(topology.hosts) > 1 and not several:  # Ranks of one name do not see each other's files.
        machines = set(exchange.allgather(_machine()))
    return topology, len(machines) == 1


def _listen(
    rank: int, topology: Topology, one_machine: bool, config: Config, stack: ExitStack
) -> tuple[Card, list[socket.socket]]:
    """Listen for the ranks of this host, and for those of others, where there are any."""
    listeners: list[socket.socket] = []
    endpoints: list[Endpoint] = []
    local, failure = b"", ""
    try:
        if len(topology.peers(rank)) > 1:
            listeners.append(stack.enter_context(_listen_locally()))
            local = listeners[0].getsockname()
        if len(topology.hosts) > 1:
            first = topology.local_rank(rank)
            chosen = choose(list_interfaces(), config.network_interfaces, one_machine=one_machine)
            for endpoint, listener in listen_remote(chosen, config.tcp_ports, first):
                endpoints.append(endpoint)
                listeners.append(stack.enter_context(listener))
    except (HorovodInternalError, OSError) as error:
        failure = str(error)
    return Card.new(local, endpoints, config.tcp_streams, failure), listeners


def _listen_locally() -> socket.socket:
    """Listen for ranks of this host, under a name that the kernel gives and forgets with us."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind("")
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_remote(
    interfaces: Sequence[Interface], ports: tuple[int, ...], first: int
) -> list[tuple[Endpoint, socket.socket]]:
    """Listen on the address of every interface.

    `ports` are the first and the last port that may be used (empty: any); the ranks of a host begin
    with different ones, the `first` from the start of the range. Raises `HorovodInternalError`.
    """
    listeners: list[tuple[Endpoint, socket.socket]] = []
    reason = ""
    try:
        for interface in interfaces:
            try:
                listener = _listen_on(interface, ports, first)
            except OSError as error:
                if error.errno not in NOT_READY:
                    raise
                reason = str(error)
            else:
                port = listener.getsockname()[1]
                endpoint = Endpoint(interface.address, interface.prefix, port)
                listeners.append((endpoint, listener))
        if not listeners:
            addresses = ", ".join(interface.address for interface in interfaces)
            raise HorovodInternalError(f"this rank cannot listen on {addresses}: {reason}")
    except BaseException:
        for _, listener in listeners:
            listener.close()
        raise
    return listeners


def listen_near_and_far(wanted: Sequence[str]) -> list[tuple[Endpoint, socket.socket]]:
    """Listen on the loopback, and where this host's ranks listen for others, on any port.

    On a host without such a network, it is the loopback alone. Raises `HorovodInternalError`.
    """
    interfaces = list_interfaces()
    near = [each for each in interfaces if each.up and each.address == LOOPBACK]
    try:
        far = choose(interfaces, wanted, one_machine=False)
    except HorovodInternalError:
        far = []
    return listen_remote(list(dict.fromkeys([*near, *far])), (), 0)


def _listen_on(interface: Interface, ports: tuple[int, ...], first: int) -> socket.socket:
    """Listen on a port of the range that nobody uses."""
    if not ports:
        return _bind(interface, 0)
    low, high = ports
    count = high - low + 1
    for step in range(count):
        try:
            return _bind(interface, low + (first + step) % count)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise HorovodInternalError(
        f"HVDLITE_TCP_PORTS={low}-{high}: all {count} ports of {interface.address} are in use; "
        "every rank of a host needs one: give a longer range"
    )


def _bind(interface: Interface, port: int) -> socket.socket:
    version6 = ":" in interface.address
    family = socket.AF_INET6 if version6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # The kernel keeps the port of a connection that has ended for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        scoped = (0, interface.scope) if version6 else ()
        listener.bind((interface.address, port, *scoped))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _machine() -> bytes:
    """Return what is equal on all ranks if they share one network stack: simulated hosts do."""
    known = [boot_id(), network_namespace(THREAD_NETWORK), *map(str, list_interfaces())]
    return hashlib.sha256("\n".join(known).encode()).digest()[:MACHINE_BYTES]


def _connect_neighbours(
    exchange: Exchange, transport: TcpTransport, ranks: set[int], deadline: float
) -> None:
    """Connect to `ranks`. Raises `HorovodInternalError` on all ranks if one cannot."""
    links = [transport.control.expect(rank) for rank in sorted(ranks)]
    while missing := [link.rank for link in links if not link.connected]:
        failures = [error for rank, error in transport.unreachable.items() if rank in missing]
        if failures:
            raise_first(exchange, failures[0])
        left = deadline - time.monotonic()
        if left <= 0:
            names = ", ".join(map(str, missing))
            text = f"rank {transport.rank} waited in vain for a connection from these ranks: "
            raise_first(exchange, HorovodInternalError(text + names), consequence=True)
        transport.poll(left)
    raise_first(exchange, None)
