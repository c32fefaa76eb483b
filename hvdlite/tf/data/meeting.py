"""Where the processes of a TF data service meet: who dispatches, which workers are there, the end.

The service answers when what is asked for has come, or its time is over.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from hvdlite.common.base.networks import list_interfaces
from hvdlite.common.connections.address import Address, listen
from hvdlite.common.connections.prove import Party
from hvdlite.common.connections.service import Client, Service, Wait
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.tcp.connect import LOOPBACK, listen_near_and_far

Addresses = Mapping[str, Sequence[tuple[str, int]]]  # by a name of the interface: host and port
SERVICE, CLIENT = "compute service", "compute client"  # the ends of a connection
_MOST_BYTES = 1 << 16  # of a request, or an answer


class ComputeService(Service):
    """Answers the `ComputeClient` of every process, in a thread that ends with this process."""

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes, host: str = ""
    ) -> None:
        """Listen on a free port of `host`; without one, where the ranks of this host would.

        That is `HVDLITE_NETWORK_INTERFACES`, or all interfaces that lead to other hosts; and the
        loopback. Raises `ValueError` for numbers that are not positive.
        """
        for name, number in (
            ("dispatchers", dispatchers), ("workers_per_dispatcher", workers_per_dispatcher),
        ):  # fmt: skip
            if number < 1:
                raise ValueError(f"{name}={number}: a data service needs at least one")
        self._dispatchers = dispatchers
        self._workers = workers_per_dispatcher
        self._known: dict[int, str] = {}  # addresses of dispatchers
        self._registered: dict[int, set[int]] = {}  # workers by dispatcher
        self._ended = False
        self._addresses: dict[str, list[tuple[str, int]]] = {}
        if host:
            sockets = [listen(Address(host, 0))]
            self._addresses[host] = [(host, sockets[0].getsockname()[1])]
        else:
            listening = listen_near_and_far(Config.from_environ().network_interfaces)
            sockets = [each for _, each in listening]
            names = {each.address: each.name for each in list_interfaces()}
            for (address, _, port), _ in listening:
                place = names.get(address, address)
                self._addresses.setdefault(place, []).append((address, port))
        methods: dict[str, Callable[..., Any]] = {
            "register_dispatcher": self._register_dispatcher,
            "wait_for_dispatcher_registration": self._wait_for_dispatcher,
            "register_worker_for_dispatcher": self._register_worker,
            "wait_for_dispatcher_worker_registration": self._wait_for_workers,
            "shutdown": self._end,
            "wait_for_shutdown": lambda: Wait(lambda: self._ended, lambda found: None),
        }
        party = Party(key, SERVICE, CLIENT)
        super().__init__("hvdlite-compute-service", sockets, party, methods, _MOST_BYTES)

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Return where the service can be reached; loopback comes first."""
        return self._addresses

    def shutdown(self) -> None:
        """End the data service: let all go who wait for its end."""
        self.post(self._end)

    # -- what clients ask for, in the service's thread

    def _register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        self._check(dispatcher_id)
        known = self._known.setdefault(dispatcher_id, dispatcher_address)
        if known != dispatcher_address:
            raise ValueError(
                f"dispatcher {dispatcher_id} is at {known} already, and cannot be at "
                f"{dispatcher_address} too"
            )
        self.look()

    def _wait_for_dispatcher(self, dispatcher_id: int, timeout: float) -> Wait:
        def result(found: bool) -> str:
            if found:
                return self._known[dispatcher_id]
            raise TimeoutError(
                f"dispatcher {dispatcher_id} has not registered within {timeout:g} s: see whether "
                "the job that starts it runs, and --dispatcher-side and --timeout of compute_worker"
            )

        self._check(dispatcher_id)
        return Wait(lambda: dispatcher_id in self._known, result, timeout)

    def _register_worker(self, dispatcher_id: int, worker_id: int) -> None:
        self._check(dispatcher_id)
        self._registered.setdefault(dispatcher_id, set()).add(worker_id)
        self.look()

    def _wait_for_workers(self, dispatcher_id: int, timeout: float) -> Wait:
        def count() -> int:
            return len(self._registered.get(dispatcher_id, ()))

        def result(found: bool) -> None:
            if not found:
                raise TimeoutError(
                    f"{count()} of the {self._workers} workers of dispatcher {dispatcher_id} have "
                    f"registered within {timeout:g} s: see whether the compute job runs, and "
                    "--timeout"
                )

        self._check(dispatcher_id)
        return Wait(lambda: count() >= self._workers, result, timeout)

    def _end(self) -> None:
        self._ended = True
        self.look()

    def _check(self, dispatcher_id: int) -> None:
        if not 0 <= dispatcher_id < self._dispatchers:
            raise IndexError(
                f"there is no dispatcher {dispatcher_id}: the data service has {self._dispatchers}"
            )


class ComputeClient:
    """Asks a `ComputeService`, by a connection of its own for each question."""

    def __init__(self, addresses: Addresses, key: bytes) -> None:
        self._addresses = [Address(*address) for each in addresses.values() for address in each]
        self._party = Party(key, CLIENT, SERVICE)

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Make a dispatcher known. Raises `ValueError` where another has its number."""
        self._ask("register_dispatcher", dispatcher_id, dispatcher_address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Sleep until a dispatcher is known; return its address. Raises `TimeoutError`."""
        return str(self._ask("wait_for_dispatcher_registration", dispatcher_id, timeout))

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Make a worker of a dispatcher known."""
        self._ask("register_worker_for_dispatcher", dispatcher_id, worker_id)

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Sleep until all workers of a dispatcher are known. Raises `TimeoutError`."""
        self._ask("wait_for_dispatcher_worker_registration", dispatcher_id, timeout)

    def shutdown(self) -> None:
        """End the data service; nothing happens where it has ended."""
        with suppress(ConnectionError):
            self._ask("shutdown")

    def wait_for_shutdown(self) -> None:
        """Sleep until the data service has been ended, or its process is gone."""
        with suppress(ConnectionError):
            self._ask("wait_for_shutdown")

    def own_host(self) -> str:
        """Return the address of this host that others who know the service can reach."""
        for host, port, _ in self._addresses:
            if host != LOOPBACK:
                with (
                    suppress(OSError),
                    socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route,
                ):
                    route.connect((host, port))  # sends nothing
                    return str(route.getsockname()[0])
        return LOOPBACK

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            client = Client(self._addresses, self._party, _MOST_BYTES)
        except ConnectionError as error:
            raise ConnectionError(
                f"the compute service cannot be reached at {error}: see whether the compute job "
                "runs, and whether the file of its configuration is its own"
            ) from error
        with closing(client):
            return client.ask(name, *arguments)
