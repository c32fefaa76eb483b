"""Where the processes of a TF data service meet: who dispatches, which workers are there, the end.

A request and its answer are JSON, over a connection of their own that both sides have proved to
know the key for. The service answers when what is asked for has come, or its time is over.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

Addresses = Mapping[str, Sequence[tuple[str, int]]]  # by a name of the interface: host and port
LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 10.0  # for one address
_MOST_BYTES = 1 << 16  # of a request


class ComputeService:
    """Answers the `ComputeClient` of every process, in threads that end with this process."""

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes, host: str = ""
    ) -> None:
        """Listen on a free port of `host`; of all interfaces without one.

        Raises `ValueError` for numbers that are not positive.
        """
        for name, number in (
            ("dispatchers", dispatchers), ("workers_per_dispatcher", workers_per_dispatcher),
        ):  # fmt: skip
            if number < 1:
                raise ValueError(f"{name}={number}: a data service needs at least one")
        self._dispatchers = dispatchers
        self._workers = workers_per_dispatcher
        self._key = key
        self._host = host
        self._changed = threading.Condition()  # guards the next three
        self._addresses: dict[int, str] = {}  # of dispatchers
        self._registered: dict[int, set[int]] = {}  # workers by dispatcher
        self._ended = False
        self._listener = Listener((host or "0.0.0.0", 0), backlog=128)
        self._answers: dict[str, Callable[..., Any]] = {
            name: getattr(self, name)
            for name in (
                "register_dispatcher", "wait_for_dispatcher_registration",
                "register_worker_for_dispatcher", "wait_for_dispatcher_worker_registration",
                "shutdown", "wait_for_shutdown",
            )
        }  # fmt: skip
        threading.Thread(target=self._accept, name="hvdlite-compute-service", daemon=True).start()

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Return where the service can be reached; loopback comes first."""
        port = int(self._listener.address[1])
        if self._host:
            return {self._host: [(self._host, port)]}
        found = {"lo": [(LOOPBACK, port)]}
        with suppress(OSError):
            name = socket.gethostname()
            infos = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            others = sorted({str(info[4][0]) for info in infos} - {LOOPBACK})
            if others:
                found[name] = [(each, port) for each in others]
        return found

    # -- what clients ask for

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Make a dispatcher known. Raises `ValueError` where another has its number."""
        self._check(dispatcher_id)
        with self._changed:
            known = self._addresses.setdefault(dispatcher_id, dispatcher_address)
            self._changed.notify_all()
        if known != dispatcher_address:
            raise ValueError(
                f"dispatcher {dispatcher_id} is at {known} already, and cannot be at "
                f"{dispatcher_address} too"
            )

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Sleep until a dispatcher is known; return its address. Raises `TimeoutError`."""
        self._check(dispatcher_id)
        if not self._wait(lambda: dispatcher_id in self._addresses, timeout):
            raise TimeoutError(
                f"dispatcher {dispatcher_id} has not registered within {timeout:g} s: see whether "
                "the job that starts it runs, and --dispatcher-side and --timeout of compute_worker"
            )
        return self._addresses[dispatcher_id]

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Make a worker of a dispatcher known."""
        self._check(dispatcher_id)
        with self._changed:
            self._registered.setdefault(dispatcher_id, set()).add(worker_id)
            self._changed.notify_all()

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Sleep until all workers of a dispatcher are known. Raises `TimeoutError`."""
        self._check(dispatcher_id)

        def count() -> int:
            return len(self._registered.get(dispatcher_id, ()))

        if not self._wait(lambda: count() >= self._workers, timeout):
            raise TimeoutError(
                f"{count()} of the {self._workers} workers of dispatcher {dispatcher_id} have "
                f"registered within {timeout:g} s: see whether the compute job runs, and --timeout"
            )

    def shutdown(self) -> None:
        """End the data service: let all go who wait for its end."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for_shutdown(self) -> None:
        """Sleep until the data service has been ended."""
        self._wait(lambda: self._ended, None)

    def close(self) -> None:
        """End the data service, and listen no more."""
        self.shutdown()
        with suppress(OSError):  # the thread sleeps in accept(), which close() does not end
            host, port = self._listener.address[:2]
            socket.create_connection((LOOPBACK if host == "0.0.0.0" else host, port), 1).close()

    def _check(self, dispatcher_id: int) -> None:
        if not 0 <= dispatcher_id < self._dispatchers:
            raise IndexError(
                f"there is no dispatcher {dispatcher_id}: the data service has {self._dispatchers}"
            )

    def _wait(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    # -- threads

    def _accept(self) -> None:
        with self._listener:
            while not self._ended:
                with suppress(OSError):
                    connection = self._listener.accept()
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(OSError, EOFError, AuthenticationError, ValueError):
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            name, arguments = json.loads(connection.recv_bytes(_MOST_BYTES))
            answer: tuple[str, Any]
            try:
                answer = "", self._answers[name](*arguments)
            except (IndexError, TimeoutError, ValueError) as error:
                answer = type(error).__name__, str(error)
            connection.send_bytes(json.dumps(answer).encode())


_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (IndexError, TimeoutError, ValueError)
}


class ComputeClient:
    """Asks a `ComputeService`; the methods are those of the service."""

    def __init__(self, addresses: Addresses, key: bytes) -> None:
        self._addresses = [address for each in addresses.values() for address in each]
        self._key = key

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        self._ask("register_dispatcher", dispatcher_id, dispatcher_address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        return str(self._ask("wait_for_dispatcher_registration", dispatcher_id, timeout))

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        self._ask("register_worker_for_dispatcher", dispatcher_id, worker_id)

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
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
        for host, port in self._addresses:
            if host != LOOPBACK:
                with (
                    suppress(OSError),
                    socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route,
                ):
                    route.connect((host, port))  # sends nothing
                    return str(route.getsockname()[0])
        return LOOPBACK

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._connect() as connection:
            try:
                connection.send_bytes(json.dumps((name, arguments)).encode())
                kind, answer = json.loads(connection.recv_bytes())
            except (EOFError, OSError) as error:
                raise ConnectionError(f"the compute service has ended during {name}") from error
        if kind:
            raise _ERRORS[kind](answer)
        return answer

    def _connect(self) -> Connection:
        """Return a connection that both sides have proved to know the key for."""
        tried = []
        for address in self._addresses:
            try:
                plain = socket.create_connection(address, CONNECT_SECONDS)
                plain.settimeout(None)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection = Connection(plain.detach())
                if not connection.poll(CONNECT_SECONDS):
                    connection.close()
                    raise TimeoutError("no answer")
                answer_challenge(connection, self._key)
                deliver_challenge(connection, self._key)
                return connection
            except (OSError, EOFError, AuthenticationError) as error:
                tried.append(f"{address[0]}:{address[1]} ({error or type(error).__name__})")
        raise ConnectionError(
            f"the compute service cannot be reached at {', '.join(tried) or 'no address'}: see "
            "whether the compute job runs, and whether the file of its configuration is its own"
        )
