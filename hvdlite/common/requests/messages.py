"""The messages of the control plane and their wire format: msgpack arrays, checked on receipt.

A rank reports the tensors that it has ready (`Report`: requests, and bits of cached requests); the
coordinator answers with orders, which every rank executes in the same sequence (`Orders`). Nothing
is ever unpickled, and a message that this version cannot have sent raises `ProtocolError`. The
theory of operation in coordinator.py shows how the messages follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_args

import msgpack

from hvdlite.common.base.bitsets import NumberSet, runs_of
from hvdlite.common.base.errors import ProtocolError

PROTOCOL_VERSION = 12
NO_BIT = -1
NO_RANK = -1
JOB_THRESHOLD = -1  # As `Request.fusion_bytes`: the fusion threshold of the job.
WHOLE_GROUP = -2  # As `Request.fusion_bytes`: the group is one segment, whatever its size.
# The settings to which allreduce may change while ranks run; "" keeps it unchanged.
PLANES = ("", "auto", "ring")
SMALLEST_PIECE, LARGEST_PIECE = 1 << 12, 1 << 24  # In bytes.


@cache
def installed_version() -> str:
    """Return the version of hvdlite, or "unknown" in a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hvdlite")
    except PackageNotFoundError:
        return "unknown"


# How the settings of a collective begin that is named by its place in a compiled program.
OF_PROGRAM = "program "


class Request(NamedTuple):
    """A tensor that one rank has ready. `SPECS` says which fields must be equal on all ranks."""

    process_set_id: int
    name: str
    collective: str
    dtype: str = ""
    # Of a join: how many joins and evictions its rank has executed; of a search for a sender: who
    # may be it.
    shape: tuple[int, ...] = ()
    device: str = ""
    reduce_op: int = 0
    root_rank: int = NO_RANK  # A global rank.
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    group: str = ""  # The name of its grouped call; "" for a tensor of its own.
    group_size: int = 0
    # Of `init`, gradients and uneven reduce_scatters: what else must be equal on all ranks. Of a
    # search for a sender: the next message of each rank in `shape`, a line each.
    settings: str = ""
    fusion_bytes: int = JOB_THRESHOLD  # The most bytes of its segment, or WHOLE_GROUP.
    # The global ranks that make this request, ascending, where these are not all of the process
    # set: a message between two ranks, or a set that its members form.
    parties: tuple[int, ...] = ()


class Response(NamedTuple):
    """The coordinator's answer for one tensor: run it, or fail it with `error`."""

    request: Request  # Of the first rank; fields that may differ are in `first_dims`.
    first_dims: tuple[int, ...] = ()  # By member, if the first dimension may differ.
    bit: int = NO_BIT  # The bit under which the members remember this answer.
    error: str = ""
    last_joined: int = NO_RANK  # Of a join: the rank that joined last.


class Segment(NamedTuple):
    """Tensors of one process set that are run together."""

    process_set_id: int
    items: tuple[Response | int, ...]  # An int is the bit of a remembered answer.
    result: bytes = b""  # Of the only item, where its data came inside requests.


class Eviction(NamedTuple):
    """The order to forget a bit, and to repeat unanswered reports of it as requests in full."""

    process_set_id: int
    bit: int


class Departed(NamedTuple):
    """The order that ends the part of `rank` in the job."""

    rank: int


class Retune(NamedTuple):
    """The order to run all later segments with these settings."""

    fusion_threshold_bytes: int
    cycle_time_ms: float
    cache_capacity: int
    allreduce: str  # One of PLANES.
    piece_bytes: int  # The bytes that rings between hosts send at a time.


class Figures(NamedTuple):
    """The order to choose algorithms by these figures of the network, which rank 0 has."""

    values: tuple[float, ...]  # In the order of `costs.Model`.


class DeviceRuns(NamedTuple):
    """The order to run these collectives on devices: what the libraries of all ranks can."""

    runs: tuple[str, ...]  # Each in the words of devices/agreement.py.


Order: TypeAlias = Segment | Eviction | Departed | Retune | Figures | DeviceRuns


class Carried(NamedTuple):
    """The data of a tensor at one rank."""

    bit: int
    rank: int
    data: bytes


class Report(NamedTuple):
    """The tensors of one process set that all of `ranks` have ready."""

    process_set_id: int
    ranks: Collection[int]  # Global ranks.
    bits: Collection[int] = ()
    requests: tuple[Request, ...] = ()
    carried: tuple[Carried, ...] = ()  # The data of some bits.


class Reports(NamedTuple):
    """Reports from a rank to its parent in the control tree."""

    reports: tuple[Report, ...]


class Orders(NamedTuple):
    """Orders from the coordinator to all ranks, passed down the control tree."""

    orders: tuple[Order, ...]


class Abort(NamedTuple):
    """The message that the job fails; `rank` is at fault, or -1 if no rank is known."""

    rank: int
    reason: str


class Depart(NamedTuple):
    """The request of `rank` to shut down, answered by `Departed`."""

    rank: int
    reason: str = ""  # What errors say of the rank; "" where it has shut down and no more is known.


class Capabilities(NamedTuple):
    """What the device libraries of `rank` can run; answered by `DeviceRuns` when all have told."""

    rank: int
    runs: tuple[str, ...]


class StackQuery(NamedTuple):
    """The request for the Python stacks of the main threads of `ranks`."""

    ranks: tuple[int, ...]


class StackReply(NamedTuple):
    """The Python stack of the main thread of `rank`."""

    rank: int
    stack: str


class WaitQuery(NamedTuple):
    """The question for which tensors the threads of `ranks` wait."""

    number: int
    ranks: tuple[int, ...]


class WaitReply(NamedTuple):
    """The tensors for which the threads of `rank` wait, and where; none if one of them works.

    It answers the question `number`.
    """

    number: int
    rank: int
    names: tuple[str, ...]
    places: tuple[str, ...]
    in_gradients: tuple[int, ...]  # 1 for a thread that exchanges gradients.


class ClockQuery(NamedTuple):
    """The request of `rank` for the clock of rank 0, sent at its own `time_ns`."""

    rank: int
    time_ns: int


class ClockReply(NamedTuple):
    """The clock of rank 0 when the query of `rank` arrived."""

    rank: int
    asked_ns: int
    answered_ns: int


EVERY_RANK = -1


class LauncherOrder(NamedTuple):
    """An order of the launcher, a line, for `rank` or EVERY_RANK, where it has no way of its own.

    It goes up to rank 0, and from there down to all.
    """

    rank: int
    line: str
    descends: int = 0  # 1 where it comes from rank 0.


Message: TypeAlias = (
    Reports
    | Orders
    | Abort
    | Depart
    | StackQuery
    | StackReply
    | ClockQuery
    | ClockReply
    | Capabilities
    | WaitQuery
    | WaitReply
    | LauncherOrder
)
_MESSAGES: tuple[type, ...] = get_args(Message)  # Their places are their numbers.
_ORDERS: tuple[type, ...] = get_args(Order)
_KIND = {kind: number for number, kind in enumerate(_MESSAGES)}
_ORDER_KIND = {kind: number for number, kind in enumerate(_ORDERS)}


def encode(message: Message) -> bytes:
    body: Any = message
    if isinstance(message, Reports):
        body = [
            (r.process_set_id, runs_of(r.ranks), runs_of(r.bits), r.requests, r.carried)
            for r in message.reports
        ]
    elif isinstance(message, Orders):
        body = [(_ORDER_KIND[type(order)], order) for order in message.orders]
    # A string may hold bytes that are no UTF-8, such as a path in a stack. They are escaped.
    encoded: bytes = msgpack.packb((_KIND[type(message)], body), unicode_errors="backslashreplace")
    return encoded


def decode(data: bytes, sender: int) -> Message:
    """Decode a message of the rank `sender`. Raises `ProtocolError` for anything else."""
    try:
        kind, body = msgpack.unpackb(data, use_list=False)
        cls = _MESSAGES[_natural(kind)]
        if cls is Reports:
            return Reports(tuple(_report(fields) for fields in body))
        if cls is Orders:
            return Orders(tuple(_order(kind, fields) for kind, fields in body))
        message: Message = cls(*_checked(body, _FIELDS[cls]))
        return message
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"rank {sender} sent a control message that hvdlite cannot have sent ({error}): "
            "is another program using its connection?",
            rank=sender,
        ) from None


T = TypeVar("T")
_MOST_NUMBERS = 1 << 20  # In one set; guards against foreign data that would fill the memory.
_SETS_KEPT = 256  # Decoded sets of ranks are cached: those below a child never change.


def _numbers(runs: Any) -> NumberSet:
    end, count = 0, 0
    for start, length in zip(runs[::2], runs[1::2], strict=True):
        if type(start) is not int or start < end or type(length) is not int or length < 1:
            raise ValueError(f"{runs!r} where ascending numbers were expected")
        end = start + length
        count += length
    if count > _MOST_NUMBERS:
        raise ValueError(f"{count} numbers")
    return NumberSet.of_runs(runs)


@lru_cache(_SETS_KEPT)
def _ranks(runs: tuple[int, ...]) -> NumberSet:
    if sum(runs[-2:]) > _MOST_NUMBERS:
        raise ValueError(f"rank {runs[-2]}")
    return _numbers(runs)


def _exactly(kind: type[T], what: str) -> Callable[[Any], T]:
    """Return a check for values of this type, as those of a subclass are none."""

    def check(value: Any) -> T:
        if type(value) is not kind:
            raise ValueError(f"{value!r} where {what} was expected")
        return value

    return check


def _each(check: Callable[[Any], T], what: str) -> Callable[[Any], tuple[T, ...]]:
    """Return a check for arrays of values that pass `check`."""

    def check_all(values: Any) -> tuple[T, ...]:
        if type(values) is not tuple:
            raise ValueError(f"{values!r} where {what} were expected")
        return tuple(map(check, values))

    return check_all


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a count was expected")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} where a number was expected")
    return float(value)


def _duration(value: Any) -> float:
    if not 0 <= _real(value) < math.inf:
        raise ValueError(f"{value!r} where a duration was expected")
    return float(value)


_integer, _text = _exactly(int, "an integer"), _exactly(str, "a text")
_bytes = _exactly(bytes, "bytes")
_naturals, _texts = _each(_natural, "counts"), _each(_text, "texts")
_durations = _each(_duration, "durations")


def _plane(value: Any) -> str:
    if value not in PLANES:
        raise ValueError(f"{value!r} where one of {', '.join(PLANES)} was expected")
    return _text(value)


def _piece(value: Any) -> int:
    size = _natural(value)
    if not SMALLEST_PIECE <= size <= LARGEST_PIECE:
        raise ValueError(f"pieces of {size} bytes")
    return size


def _request(value: Any) -> Request:
    return Request(*_checked(value, _FIELDS[Request]))


_FIELDS: dict[type, tuple[Any, ...]] = {
    Request: (
        _natural, _text, _text, _text, _naturals, _text, _natural, _integer, _real, _real,
        _text, _natural, _text, _integer, _naturals,
    ),
    Response: (_request, _naturals, _integer, _text, _integer),
    Carried: (_natural, _natural, _bytes),
    Eviction: (_natural, _natural),
    Departed: (_natural,),
    Retune: (_natural, _duration, _natural, _plane, _piece),
    Figures: (_durations,),
    DeviceRuns: (_texts,),
    Capabilities: (_natural, _texts),
    Abort: (_integer, _text),
    Depart: (_natural, _text),
    StackQuery: (_naturals,),
    StackReply: (_natural, _text),
    WaitQuery: (_natural, _naturals),
    WaitReply: (_natural, _natural, _texts, _texts, _naturals),
    LauncherOrder: (_integer, _text, _natural),
    ClockQuery: (_natural, _integer),
    ClockReply: (_natural, _integer, _integer),
}  # fmt: skip


def _checked(values: Any, checks: tuple[Any, ...]) -> list[Any]:
    if type(values) is not tuple or len(values) != len(checks):
        raise ValueError(f"a record of another length than {len(checks)}")
    return [check(value) for check, value in zip(checks, values, strict=True)]


def _report(fields: Any) -> Report:
    process_set_id, ranks, bits, requests, carried = fields
    return Report(
        _natural(process_set_id),
        _ranks(ranks),
        _numbers(bits),
        tuple(map(_request, requests)),
        tuple(Carried(*_checked(each, _FIELDS[Carried])) for each in carried),
    )


def _order(kind: Any, fields: Any) -> Order:
    cls = _ORDERS[_natural(kind)]
    if cls is Segment:
        process_set_id, items, result = fields
        if type(items) is not tuple or set(map(type, items)) != {int}:
            items = tuple(map(_item, items))
        return Segment(_natural(process_set_id), items, _bytes(result))
    order: Order = cls(*_checked(fields, _FIELDS[cls]))
    return order


def _item(value: Any) -> Response | int:
    return value if type(value) is int else Response(*_checked(value, _FIELDS[Response]))
