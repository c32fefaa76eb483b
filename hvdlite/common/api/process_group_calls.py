"""What process groups call and no framework's module publishes: send, receive, and reduce.

A message is one row of the table of collectives, in which two ranks take part and all others do
not: it has its place in the one total order, so that messages and collectives cannot wait for each
other. The two need no common process set. They meet by the name: the messages of a pair that are on
their way at the same time need different names.

Inside a host a blocking `send` and `recv` of little data meet in shared memory, without the
coordinator (see [Note: short calls]); every other message takes one negotiation.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from hvdlite.common.api.call_checks import check_text
from hvdlite.common.api.options import reducing
from hvdlite.common.api.starting_forms import only
from hvdlite.common.api.submit import Operation, start
from hvdlite.common.api.tensor_entries import TensorEntry, entry_of_transfer
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.requests.messages import Request
from hvdlite.common.requests.process_set_table import GLOBAL_ID
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.tensors.adapter import DTYPES, Adapter, TensorSpec
from hvdlite.common.tensors.numpy_adapter import NumpyAdapter

T = TypeVar("T")

_NUMPY: Adapter[Any] = NumpyAdapter()


def send_async(tensor: T, peer: int, name: str, *, adapter: Adapter[T] = _NUMPY) -> Operation[T]:
    """Start to send a tensor to the global rank `peer`, which receives under the same `name`.

    The tensor must not change until the operation has ended. Raises `ValueError` for what this rank
    can see to be wrong. What it returns has ``poll()``, ``wait()`` and ``entries[0].handle``;
    ``wait`` raises `HorovodInternalError` where dtype or number of elements differ from those of
    the target, or `peer` was lost, has shut down or has joined.
    """
    return start_message(for_collective(), adapter, tensor, peer, name, sends=True)


def recv_async(target: T, peer: int, name: str, *, adapter: Adapter[T] = _NUMPY) -> Operation[T]:
    """Start to receive what the global rank `peer` sends under `name`, into `target`.

    Target and tensor have one dtype and one number of elements; their shapes may differ. Returns
    and raises as `send_async`.
    """
    return start_message(for_collective(), adapter, target, peer, name, sends=False)


def send(tensor: T, peer: int, name: str, *, adapter: Adapter[T] = _NUMPY) -> None:
    """Do as `send_async` does, and wait until the receiver has all of it."""
    send_async(tensor, peer, name, adapter=adapter).wait()


def recv(target: T, peer: int, name: str, *, adapter: Adapter[T] = _NUMPY) -> T:
    """Do as `recv_async` does, and wait: `target`, with what was sent."""
    recv_async(target, peer, name, adapter=adapter).wait()
    return target


def start_message(
    runtime: Runtime, adapter: Adapter[T], tensor: T, peer: int, name: str, *, sends: bool
) -> Operation[T]:
    """Start to send or to receive at a rank that need not be the calling thread's."""
    spec = adapter.spec(tensor)
    request = message_request(runtime, spec, peer, name, sends=sends)
    entry: TensorEntry[T] = entry_of_transfer(request, adapter, tensor, spec, sends=sends)
    runtime.engine.enqueue((entry,))
    return Operation((entry,))


def message_request(
    runtime: Runtime, spec: TensorSpec, peer: int, name: str, *, sends: bool
) -> Request:
    """Return the request of a message. Raises `ValueError` as `send_async`."""
    what = f"{'send to' if sends else 'recv from'} rank {peer} of '{name}'"
    rank, size = runtime.rank, runtime.topology.size
    if type(peer) is not int or not 0 <= peer < size or peer == rank:
        raise ValueError(
            f"{what} on rank {rank}: the other side is one of the ranks 0 to {size - 1}, "
            f"and not {rank} itself"
        )
    if spec.dtype not in DTYPES:
        raise ValueError(f"{what}: Tensor type {spec.dtype} is not supported")
    check_text("point_to_point", name)
    return Request(
        GLOBAL_ID,
        message_name(*((rank, peer) if sends else (peer, rank)), name),
        "point_to_point",
        dtype=spec.dtype,
        shape=(math.prod(spec.shape),),
        device=spec.device,
        root_rank=rank if sends else peer,
        parties=(min(rank, peer), max(rank, peer)),
    )


def message_name(sender: int, receiver: int, name: str) -> str:
    """Return the name by which the ranks agree on a message."""
    return f"point_to_point.{sender}.{receiver}.{name}"


def reduce_async(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    in_place: bool = False,
    adapter: Adapter[T] = _NUMPY,
) -> Operation[T]:
    """Start to reduce a tensor over all ranks for the global rank `root_rank`.

    Every rank gives a tensor of the same shape and dtype. `op` as in `Forms.allreduce_async`,
    without Adasum. The ``wait()`` of what it returns gives the result on the root, and None on the
    others; `in_place` it gives `tensor`, into which the root's result is written, while the others
    keep theirs. Raises as all forms.
    """
    options = reducing(op, root_rank, prescale_factor, postscale_factor, process_set)
    runtime, targets = for_collective(), [tensor] if in_place else None
    entries = start(runtime, adapter, "reduce", name, [tensor], options, targets)
    has_result = in_place or runtime.rank == root_rank
    return Operation(entries, only if has_result else lambda operation, results: None)


def reduce(tensor: T, root_rank: int, *arguments: Any, **options: Any) -> T | None:
    """Do as `reduce_async` does, which has the same arguments, and wait."""
    result: T | None = reduce_async(tensor, root_rank, *arguments, **options).wait()
    return result
