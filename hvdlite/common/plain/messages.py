"""What ranks say to each other, and its form on the wire: msgpack arrays, checked when they come.

A rank reports what it has (`Report`: requests, and bits of requests that were negotiated before);
the coordinator answers with orders that every rank follows in the same sequence (`Orders`).
Nothing here is ever unpickled, and a message that this version cannot have sent raises
`ProtocolError`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgpack

from hvdlite.common.base.bitsets import NumberSet, runs_of
from hvdlite.common.base.errors import ProtocolError

PROTOCOL_VERSION = 3
NO_BIT = -1
NO_RANK = -1
JOB_THRESHOLD = -1  # `Request.fusion_bytes`: as the job is set
WHOLE_GROUP = -2  # its group is one segment, whatever the size
PLANES = ("", "auto", "ring")  # to which allreduce may change while ranks run; "": not at all
SMALLEST_PIECE, LARGEST_PIECE = 1 << 12, 1 << 24  # bytes


class Request(NamedTuple):
    """One rank has this tensor ready. All fields but the name are compared between ranks."""

    process_set_id: int
    name: str
    collective: str
    dtype: str = ""
    shape: tuple[int, ...] = ()  # of a join: how many joins and evictions its rank has obeyed
    device: str = ""
    reduce_op: int = 0
    root_rank: int = NO_RANK  # a global rank
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    group: str = ""  # members of a group have its name, and are answered together
    group_size: int = 0
    settings: str = ""  # of `init` and gradients: what all ranks must have set alike
    fusion_bytes: int = JOB_THRESHOLD  # of the segment that it joins, at most; or WHOLE_GROUP


class Response(NamedTuple):
    """The coordinator's answer for one tensor: run it, or fail it with `error`."""

    request: Request  # of the first rank; what ranks may differ in is in first_dims
    first_dims: tuple[int, ...] = ()  # by member, where the first dimension may differ
    bit: int = NO_BIT  # where the members shall remember this answer
    error: str = ""
    last_joined: int = NO_RANK


class Segment(NamedTuple):
    """Tensors of one process set that are run together."""

    process_set_id: int
    items: tuple[Response | int, ...]  # an int is the bit of a remembered answer


class Eviction(NamedTuple):
    """Forget a bit; who has sent it and got no answer sends the request again, in full."""

    process_set_id: int
    bit: int


class Departed(NamedTuple):
    """`rank` takes part in nothing from here on."""

    rank: int


class Retune(NamedTuple):
    """From here on, these are the settings: what comes after is run with them on every rank."""

    fusion_threshold_bytes: int
    cycle_time_ms: float
    cache_capacity: int
    allreduce: str  # one of PLANES
    piece_bytes: int  # that rings between hosts send at a time


Order: TypeAlias = Segment | Eviction | Departed | Retune


class Report(NamedTuple):
    """What some ranks have ready, in one process set."""

    process_set_id: int
    ranks: Collection[int]  # global ranks for which all of this holds
    bits: Collection[int] = ()
    requests: tuple[Request, ...] = ()


class Reports(NamedTuple):
    """From a rank to its parent."""

    reports: tuple[Report, ...]


class Orders(NamedTuple):
    """From the coordinator to all ranks, through the tree."""

    orders: tuple[Order, ...]


class Abort(NamedTuple):
    """The job cannot go on; `rank` is the one at fault, or -1."""

    rank: int
    reason: str


class Depart(NamedTuple):
    """`rank` shuts down and asks to be left out from now on."""

    rank: int


class StackQuery(NamedTuple):
    """These ranks shall say where their main thread stands."""

    ranks: tuple[int, ...]


class StackReply(NamedTuple):
    """The Python stack of the main thread of `rank`."""

    rank: int
    stack: str


class ClockQuery(NamedTuple):
    """What time is it there? `rank` asks, at its own `time_ns`."""

    rank: int
    time_ns: int


class ClockReply(NamedTuple):
    """The clock of the coordinator's host when the query came."""

    rank: int
    asked_ns: int
    answered_ns: int


Message: TypeAlias = (
    Reports | Orders | Abort | Depart | StackQuery | StackReply | ClockQuery | ClockReply
)
_MESSAGES: tuple[type, ...] = (
    Reports,
    Orders,
    Abort,
    Depart,
    StackQuery,
    StackReply,
    ClockQuery,
    ClockReply,
)
_ORDERS: tuple[type, ...] = (Segment, Eviction, Departed, Retune)
_KIND = {kind: number for number, kind in enumerate(_MESSAGES)}
_ORDER_KIND = {kind: number for number, kind in enumerate(_ORDERS)}


def encode(message: Message) -> bytes:
    """Encode a message."""
    body: Any = message
    if isinstance(message, Reports):
        body = [
            (r.process_set_id, runs_of(r.ranks), runs_of(r.bits), r.requests)
            for r in message.reports
        ]
    elif isinstance(message, Orders):
        body = [(_ORDER_KIND[type(order)], order) for order in message.orders]
    # Text can hold what is not UTF-8, such as a path in a stack: it is escaped, never an error.
    encoded: bytes = msgpack.packb((_KIND[type(message)], body), unicode_errors="backslashreplace")
    return encoded


def decode(data: bytes, sender: int) -> Message:
    """Decode a message of the rank `sender`. Raises `ProtocolError` if it is none."""
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


_MOST_NUMBERS = 1 << 20  # in one set: more is no message of ours
_SETS_KEPT = 256  # the ranks below a child are the same in every message


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


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a count was expected")
    return value


def _naturals(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple:
        raise ValueError(f"{value!r} where counts were expected")
    return tuple(map(_natural, value))


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} where an integer was expected")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} where a text was expected")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} where a number was expected")
    return float(value)


def _duration(value: Any) -> float:
    if not 0 <= _real(value) < math.inf:
        raise ValueError(f"{value!r} where a duration was expected")
    return float(value)


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
        _text, _natural, _text, _integer,
    ),
    Response: (_request, _naturals, _integer, _text, _integer),
    Eviction: (_natural, _natural),
    Departed: (_natural,),
    Retune: (_natural, _duration, _natural, _plane, _piece),
    Abort: (_integer, _text),
    Depart: (_natural,),
    StackQuery: (_naturals,),
    StackReply: (_natural, _text),
    ClockQuery: (_natural, _integer),
    ClockReply: (_natural, _integer, _integer),
}  # fmt: skip


def _checked(values: Any, checks: tuple[Any, ...]) -> list[Any]:
    if type(values) is not tuple or len(values) != len(checks):
        raise ValueError(f"a record of another length than {len(checks)}")
    return [check(value) for check, value in zip(checks, values, strict=True)]


def _report(fields: Any) -> Report:
    process_set_id, ranks, bits, requests = fields
    return Report(
        _natural(process_set_id), _ranks(ranks), _numbers(bits), tuple(map(_request, requests))
    )


def _order(kind: Any, fields: Any) -> Order:
    cls = _ORDERS[_natural(kind)]
    if cls is Segment:
        process_set_id, items = fields
        return Segment(_natural(process_set_id), tuple(map(_item, items)))
    order: Order = cls(*_checked(fields, _FIELDS[cls]))
    return order


def _item(value: Any) -> Response | int:
    return value if type(value) is int else Response(*_checked(value, _FIELDS[Response]))
