"""``hvdlite://``: the ranks of the job meet through the engine, and share a store of torch.

Rank 0 serves a TCPStore at a port that the system chooses, and tells the others where. They connect
in turn to its addresses, nearest first; a token in the store proves that it is the right one.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlparse
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hvdlite.common.api.objects import allgather_object, broadcast_object
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.networks import list_interfaces
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request
from hvdlite.common.requests.process_set_table import GLOBAL_ID
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.lifecycle import init
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.transport.tcp.addresses import Endpoint, choose, order
from hvdlite.torch.process_group.waiting import waitable

TIMEOUT = timedelta(minutes=30)
LOOPBACK = "127.0.0.1"
TOKEN = "hvdlite/token"
PROBE_SECONDS = 3.0  # For one address; one behind a firewall never answers.
ROUND = "process_group.store"


class Offer(NamedTuple):
    """Where rank 0 serves its store, or why it cannot."""

    endpoints: Sequence[Endpoint] = ()
    port: int = 0
    token: bytes = b""
    failure: str = ""


class _Kept:
    """The store of one world, for all its process groups: a new one takes seconds now and then."""

    def __init__(self) -> None:
        self.store: Any = None
        self.groups = 0  # How many default groups it has had.


_stores: WeakKeyDictionary[Runtime, _Kept] = WeakKeyDictionary()


def meet(url: str, timeout: timedelta | None) -> tuple[Any, int, int]:
    """Return a store of all ranks, this rank and the number of ranks; blocks.

    Raises `ValueError` for a `url` that says another rank or number of ranks than hvdlite, and
    `HorovodInternalError` on all ranks when one cannot reach the store, and on those that have come
    when another one has not after `timeout`.
    """
    init()
    runtime = current()
    size = runtime.topology.size
    _check(dict(parse_qsl(urlparse(url).query)), runtime.rank, size)
    return _shared_store(runtime, timeout or TIMEOUT), runtime.rank, size


def _check(said: Mapping[str, str], rank: int, size: int) -> None:
    for name, value in (("rank", rank), ("world_size", size)):
        if said.get(name, str(value)) != str(value):
            raise ValueError(
                f"init_process_group(..., {name}={said[name]}), but hvdlite has {name} {value} "
                f"here: leave {name} out"
            )


def _shared_store(runtime: Runtime, timeout: timedelta) -> Any:
    """Return a part of the store of this world that no other process group has.

    Sleeps until all ranks make a group. Raises `HorovodInternalError` after `timeout`.
    """
    entry = Entry(Request(GLOBAL_ID, f"{ROUND}.begin", "barrier"))
    runtime.engine.enqueue([entry])
    if not entry.handle.ended_within(waitable(timeout.total_seconds())):
        raise HorovodInternalError(
            f"init_process_group: some rank has not called it after {timeout.total_seconds():g} s. "
            "Rank 0 logs which ones after HVDLITE_STALL_CHECK_TIME_SECONDS; a longer timeout can "
            "be given to init_process_group()",
            job_goes_on=True,
        )
    entry.handle.wait()
    kept = _stores.setdefault(runtime, _Kept())
    if kept.store is None:
        kept.store = _new_store(runtime)
    kept.groups += 1
    prefixed: Any = getattr(dist, "PrefixStore")  # noqa: B009 - torch does not say that it has it
    store = prefixed(f"hvdlite/{kept.groups}", kept.store)
    store.set_timeout(timeout)
    return store


def _new_store(runtime: Runtime) -> Any:
    store, offer, failure = None, Offer(), ""
    if runtime.rank == 0:
        store, offer = _serve(runtime)
    offer = broadcast_object(offer, 0, ROUND)
    if offer.failure:
        raise HorovodInternalError(f"rank 0 cannot serve a store: {offer.failure}", 0)
    if store is None:
        try:
            store = _connect(runtime, offer)
        except (RuntimeError, OSError) as error:
            failure = str(error)
    # It is a barrier as well: rank 0 may close the store as soon as it is through.
    for rank, text in enumerate(allgather_object(failure, ROUND)):
        if text:
            raise HorovodInternalError(f"rank {rank} cannot reach the store of rank 0: {text}")
    return store


def _serve(runtime: Runtime) -> tuple[Any, Offer]:
    """Serve a store; return it with the offer for the other ranks."""
    try:
        store = _tcp_store(LOOPBACK, 0, runtime, serves=True)
        token = secrets.token_bytes(16)
        store.set(TOKEN, token)
        one_host = len(runtime.topology.hosts) == 1
        wanted = () if one_host else runtime.config.network_interfaces
        chosen = choose(list_interfaces(), wanted, one_machine=one_host)
    except (RuntimeError, OSError) as error:
        return None, Offer(failure=str(error))
    endpoints = [Endpoint(each.address, each.prefix, store.port) for each in chosen]
    return store, Offer(endpoints, store.port, token)


def _connect(runtime: Runtime, offer: Offer) -> Any:
    """Return the store of rank 0. Raises `RuntimeError` with what was tried."""
    tried = []
    until = time.monotonic() + runtime.config.start_timeout_seconds
    host_of = runtime.topology.host_of
    near = [LOOPBACK] if host_of[runtime.rank] == host_of[0] else []
    targets = order(list_interfaces(), offer.endpoints)
    for host in near + [str(target.address[0]) for target in targets]:
        try:
            left = max(min(PROBE_SECONDS, until - time.monotonic()), 0.1)
            socket.create_connection((host, offer.port), left).close()
            store = _tcp_store(host, offer.port, runtime)
            if store.check([TOKEN]) and store.get(TOKEN) == offer.token:
                return store
            tried.append(f"{host}: another store answers")
        except (RuntimeError, OSError) as error:
            tried.append(f"{host}: {error}")
    raise RuntimeError(
        f"port {offer.port} at {'; '.join(tried) or 'no address'}. Open the port range for ranks, "
        "or name the network of the job by HVDLITE_NETWORK_INTERFACES"
    )


def _tcp_store(host: str, port: int, runtime: Runtime, *, serves: bool = False) -> Any:
    make: Any = getattr(dist, "TCPStore")  # noqa: B009 - torch does not say that it has it
    limit = timedelta(seconds=runtime.config.start_timeout_seconds)
    size = runtime.topology.size
    return make(host, port, size, serves, timeout=limit, wait_for_workers=False)
