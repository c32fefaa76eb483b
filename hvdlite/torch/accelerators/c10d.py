"""Libraries by the process groups that torch and vendors have: NCCL, RCCL, XCCL, HCCL, CNCL, gloo.

hvdlite makes each group itself, of its own members and with a store of its own: it is not the
default group of the program, nor registered in torch.distributed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hvdlite.common.base.reduce_op import BITWISE, ReduceOp
from hvdlite.common.devices.interface import Communicator
from hvdlite.common.devices.nccl.library import may_share_devices
from hvdlite.common.settings.config import Config
from hvdlite.torch.accelerators.context import HostContext, TorchContext, context_of
from hvdlite.torch.accelerators.store import StoreClient, StoreServer
from hvdlite.torch.device_modules import accelerator_kind
from hvdlite.torch.devices import HOST_AS_DEVICE

GLOO = "gloo"
_SUCCEEDED = 0  # WorkResult::SUCCESS of c10d.
TIMEOUT = timedelta(days=1)  # hvdlite itself notices lost and late ranks.

_COMMON = frozenset(("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32"))
_ALL = _COMMON | {"float64"}
# What the libraries reduce; those that are not named here reduce the least of all.
_REDUCED = {
    GLOO: _ALL,
    "nccl": _ALL,
    "xccl": _ALL,
    "hccl": _COMMON - {"uint8"},
    "cncl": _COMMON - {"int64"},
}
_LEAST = frozenset(("int32", "float16", "float32"))
_BITS = {GLOO: frozenset(("int8", "uint8", "int32", "int64"))}
_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}
Maker = Callable[[Any, int, int, timedelta], Any]  # (store, rank, size, timeout) -> group


class C10dLibrary:
    """The process groups of one backend, for one kind of device."""

    def __init__(self, kind: str, backend: str, make: Maker) -> None:
        self.name = f"c10d:{backend}"
        self.device_kind = kind
        self.shares_devices = backend == GLOO or may_share_devices()
        self._backend = backend
        self._make = make
        # The stores that this rank serves, until their communicators are there.
        self._servers: dict[bytes, StoreServer] = {}

    def supports(self, collective: str, dtype: str, op: ReduceOp | None) -> bool:
        """Return whether the backend reduces the dtype; all are moved, as bytes."""
        if op is None:
            return True
        if op in BITWISE:
            return dtype in _BITS.get(self._backend, ())
        return op in _OPS and dtype in _REDUCED.get(self._backend, _LEAST)

    def context(self, device: Any, local_rank: int) -> TorchContext:
        """Return the context of `device`, or of the one that the local rank has."""
        if self.device_kind == HOST_AS_DEVICE:
            return HostContext()
        return context_of(self.device_kind, device, local_rank)

    def unique_id(self) -> bytes:
        """Serve a store; return where it is."""
        server = StoreServer(Config.from_environ().network_interfaces)
        self._servers[server.offer] = server
        return server.offer

    def connect(
        self, unique_id: bytes, index: int, size: int, context: TorchContext
    ) -> Communicator:
        """Make the group, by the store of its first member."""
        try:
            store = StoreClient(unique_id, Config.from_environ().start_timeout_seconds)
            with _quiet_nccl:
                group = self._make(store, index, size, TIMEOUT)
                if self._backend == "nccl":  # Which otherwise connects in the first collective.
                    group.eager_connect_single_device(context.device)
        except BaseException:
            self.discard(unique_id)
            raise
        kept = store, self._servers.pop(unique_id, None)
        return C10dCommunicator(group, *kept, waits=self._backend == GLOO)

    def discard(self, unique_id: bytes) -> None:
        """Close the store of a group that there will not be."""
        server = self._servers.pop(unique_id, None)
        if server is not None:
            server.close()


class _QuietNccl:
    """A context in which groups of NCCL are made that never end the process by themselves."""

    _variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

    def __init__(self) -> None:
        self._lock = threading.Lock()  # Guards the attributes below, and the variable.
        self._inside = 0  # How many threads make a group: they wait for each other.
        self._before: str | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = os.environ.get(self._variable)
                os.environ[self._variable] = "0"
            self._inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._before is None:
                del os.environ[self._variable]
            elif not self._inside and self._before is not None:
                os.environ[self._variable] = self._before


_quiet_nccl = _QuietNccl()


class C10dCommunicator:
    """A process group. Its collectives are ordered behind the current stream of the thread."""

    def __init__(
        self, group: Any, store: StoreClient, server: StoreServer | None, *, waits: bool
    ) -> None:
        """Let the thread that calls a collective wait for it, or else the current stream."""
        self._waits, self._group, self._store = waits, group, store
        self._server = server
        self._lock = threading.Lock()  # Guards `_works` and `_error`.
        self._works: deque[Any] = deque()  # Those that may be unfinished.
        self._error = ""

    def allreduce(
        self, source: torch.Tensor, target: torch.Tensor, op: ReduceOp, stream: Any
    ) -> None:
        """Reduce over all members."""
        _copy(source, target)
        options = _options(c10d.AllreduceOptions, reduceOp=_OPS[op])
        self._do(lambda: self._group.allreduce([target], options))

    def reduce(
        self, source: torch.Tensor, target: torch.Tensor, op: ReduceOp, root: int, stream: Any
    ) -> None:
        """Reduce to the member at `root`."""
        _copy(source, target)
        options = _options(c10d.ReduceOptions, reduceOp=_OPS[op], rootRank=root, rootTensor=0)
        self._do(lambda: self._group.reduce([target], options))

    def broadcast(self, buffer: torch.Tensor, root: int, stream: Any) -> None:
        """Copy the buffer of the member at `root` to all."""
        options = _options(c10d.BroadcastOptions, rootRank=root, rootTensor=0)
        self._do(lambda: self._group.broadcast([_bytes(buffer)], options))

    def allgather(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
        """Gather as many elements from each member."""
        given, taken = _bytes(source), _bytes(target)
        self._do(lambda: self._group._allgather_base(taken, given, _options(c10d.AllgatherOptions)))

    def reducescatter(
        self, source: torch.Tensor, target: torch.Tensor, op: ReduceOp, stream: Any
    ) -> None:
        """Reduce, and give each member its part."""
        options = _options(c10d.ReduceScatterOptions, reduceOp=_OPS[op])
        self._do(lambda: self._group._reduce_scatter_base(target, source, options))

    def alltoall(
        self,
        source: torch.Tensor,
        send_counts: Sequence[int],
        target: torch.Tensor,
        receive_counts: Sequence[int],
        stream: Any,
    ) -> None:
        """Send the next elements to each member."""
        size = source.element_size()
        sent, received = ([n * size for n in each] for each in (send_counts, receive_counts))
        given, taken = _bytes(source), _bytes(target)
        options = _options(c10d.AllToAllOptions)
        self._do(lambda: self._group.alltoall_base(taken, given, received, sent, options))

    def _do(self, call: Callable[[], Any]) -> None:
        """Queue a collective, and let the current stream wait for it; gloo lets the thread."""
        if self._error:
            return
        try:
            work = call()
            if not self._waits:
                with self._lock:
                    self._works.append(work)
            work.wait()
        except Exception as error:
            with self._lock:
                self._error = self._error or f"{type(error).__name__}: {error}"

    def async_error(self) -> str:
        """Return why a collective has failed."""
        with self._lock:
            while self._works and not self._error:
                work = self._works[0]
                if not work.is_completed():
                    break
                failure = _exception(work)
                if failure is not None:
                    self._error = str(failure) or type(failure).__name__
                self._works.popleft()
            return self._error

    def abort(self) -> None:
        """End what is queued."""
        with self._lock:
            self._error = self._error or "the communicator was aborted"
        self._group.abort()
        self._close_store()

    def close(self) -> None:
        """Free the group."""
        shutdown = getattr(self._group, "shutdown", None)
        if shutdown is not None:
            shutdown()
        self._close_store()

    def _close_store(self) -> None:
        self._store.close()
        if self._server is not None:
            self._server.close()


def _exception(work: Any) -> Any:
    """Return the error of a completed work, None without one.

    Some releases of torch raise where there is none, and some cannot give an exception of C++ to
    Python at all: `TypeError`. Those tell how a work has ended by a future.
    """
    try:
        return work.exception()
    except (AttributeError, RuntimeError):
        return None
    except TypeError:
        with suppress(AttributeError, RuntimeError):
            result = work.get_future_result()
            if result.done() and result.value() != _SUCCEEDED:
                return RuntimeError(f"a collective has ended with result {result.value()}")
        return None


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source, non_blocking=True)


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    """Return the memory as bytes: libraries move types that they do not know."""
    return buffer.view(torch.uint8)


def _options(kind: Any, **values: Any) -> Any:
    options = kind()
    for key, value in values.items():
        setattr(options, key, value)
    return options


def _maker(backend: str) -> Maker | None:
    """Return what makes a group of a backend; None where this build of torch lacks it."""
    plug_in = dist.Backend._plugins.get(backend.upper())
    if plug_in is not None:
        return partial(_of_plug_in, plug_in)
    name = "Gloo" if backend == GLOO else backend.upper()
    made: Any = getattr(dist, f"ProcessGroup{name}", None)
    if made is None or backend == GLOO:
        return made  # type: ignore[no-any-return]

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = made.Options()
        options._timeout = timeout
        return made(store, rank, size, options)

    return make


def _of_plug_in(plug_in: Any, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if not plug_in.extended_api:
        return plug_in.creator_fn(store, rank, size, timeout)
    options = c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = timeout, "hvdlite"
    options.global_ranks_in_group = list(range(size))
    return plug_in.creator_fn(options, None)


def of_accelerator() -> C10dLibrary | None:
    """Return the library for the accelerator of this machine, if torch has a backend for it."""
    kind = accelerator_kind()
    if kind is None:
        return None
    backend = dist.Backend.default_device_backend_map.get(kind, "")
    make = _maker(backend) if backend not in ("", GLOO, "hvdlite") else None
    return None if make is None else C10dLibrary(kind, backend, make)


def of_host() -> C10dLibrary | None:
    """Return gloo for tensors on the CPU, which take the way of an accelerator."""
    make = _maker(GLOO)
    return None if make is None else C10dLibrary(HOST_AS_DEVICE, GLOO, make)
