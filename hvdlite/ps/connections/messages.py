"""The messages of a parameter server: msgpack, and raw payloads.

What goes to a peer at the same time goes together, in the head of one frame: an array of messages,
each with its small payloads. Large ones follow the head, as its arrays.

| kind | from | answered by |
|---|---|---|
| hello | any -> scheduler, server | welcome or refused |
| declare | worker -> scheduler | layout |
| beat | any -> scheduler | beat: who is alive, and the version of the layout |
| leave, barrier | worker -> scheduler | done |
| clocks | worker -> scheduler | done: it holds its pushes back, and says the step of each table |
| stand, ready | server -> scheduler | done: it says its steps; it has what it needs |
| plan | server -> scheduler | plan: the next layout |
| scale | worker -> scheduler | done: fewer servers are to be left |
| turn, over | worker -> scheduler | turn: it may save or load now, or need not; done |
| save, load | worker -> server | saved, loaded: a phase of `ps.save` or `ps.load` is done |
| take | server -> server | taken: parts of a table that the other one keeps in the next layout |
| start | worker -> server | started: version, clock of the worker; or wanted |
| offer | worker -> server | started: it brings the values that were wanted |
| push | worker -> server | pushed: version; a part of it may go before (see `gradient_pieces`) |
| pull | worker -> server | values: version, and payloads |
| push_rows, pull_rows | worker -> server | pushed, values |

Every request has an id, and its answer repeats it: a request that was sent again is answered twice,
and the second answer is dropped. `failed` answers what cannot be done, with the reason; `moved` a
request that was made for an older layout; `restarted` one to a server that does not know the worker
any more; `rolled_back` one for a step that the server has lost; `overtaken` one of a save or a load
after which another one has begun.

This module never sends. Nothing that arrives is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import msgpack

from hvdlite.common.base.errors import ProtocolError

SCHEDULER, SERVER, WORKER = "scheduler", "server", "worker"  # The roles of processes.
KINDS = frozenset(
    {
        "hello", "welcome", "refused", "declare", "layout", "beat", "leave",
        "barrier", "done",
        "start", "wanted", "offer", "started", "push", "pushed", "pull", "values", "push_rows",
        "pull_rows", "clocks", "plan", "stand", "ready", "scale", "take", "taken", "turn", "over",
        "save", "saved", "load", "loaded", "failed", "overtaken", "moved", "restarted",
        "rolled_back",
    }
)  # fmt: skip
# The kinds of messages that carry payloads.
CARRIERS = frozenset({"offer", "push", "pull", "push_rows", "pull_rows", "take", "values"})
FIELDS = [str, int, str, int, int, dict, list]  # Of a message.
MOST_HEAD_BYTES = 8 << 20
INSIDE_BYTES = 1 << 14  # Payloads up to this size lie in the message: copies cost less than arrays.
MOST_INSIDE_BYTES = 1 << 18  # Of a message.
# Of messages that go together: the other end begins with them then, and looks at others after them.
FRAME_BYTES = 1 << 17
COUNT = Struct(">BI")  # Begins an array of msgpack: its type, and how many messages there are.
ARRAY_TYPE = 0xDD
REPLACES = "replaces"  # In the body of an offer: see [Note: first values].
LASTS = "lasts"  # In the body of `failed`: all that is asked of the table from now on fails so.

Buffer = bytes | bytearray | memoryview


class Message(NamedTuple):
    """One message. `payloads` are raw bytes, whose meaning `body` or the layout tells."""

    kind: str
    request: int = 0
    table: str = ""
    clock: int = 0  # Of the worker in requests; the version in answers.
    incarnation: int = 0  # How often the server has started, in its answers; see `layout`.
    body: Mapping[str, Any] = {}
    payloads: Sequence[Buffer] = ()

    @property
    def layout(self) -> int:
        """The version of the layout in which the sender is, in a request."""
        return self.incarnation

    @property
    def nbytes(self) -> int:
        """The bytes of all payloads."""
        return sum(map(len, self.payloads))


class Answer(NamedTuple):
    """A message to a peer."""

    peer: bytes
    message: Message


def answer_to(peer: bytes, request: Message, kind: str, **body: Any) -> Answer:
    """Return the answer of a kind to a request that a peer has sent."""
    return Answer(peer, Message(kind, request.request, request.table, body=body))


def ignore(*_: object) -> None:
    """Take no note of a message, or of what has become of a request."""


@lru_cache(1024)
def role_of(peer: bytes) -> str:
    """Return the role of a peer: the first word of its name."""
    return peer.partition(b" ")[0].decode(errors="replace")


def two_processes(member: str, present: bytes, former: bytes) -> str:
    """Return what a process hears whose place another one has, though it lives; see `name_of`."""
    now, before = (peer.decode(errors="replace").split(" ")[-2:][0] for peer in (present, former))
    return (
        f"{member} is the process {now} now, and this is the process {before}, which was {member} "
        "before and still runs: end a process before its successor begins, and give no two of them "
        "the same number or id (HVDLITE_NODE_NUMBER, HVDLITE_NODE_ID)"
    )


def pack(message: Message) -> tuple[bytes, list[Buffer]]:
    """Return what a head has of a message, and the arrays that follow the head."""
    inside: list[Buffer | None] = []
    arrays: list[Buffer] = []
    left = MOST_INSIDE_BYTES
    for payload in message.payloads:
        nbytes = len(payload)
        if nbytes <= INSIDE_BYTES and nbytes <= left:
            inside.append(payload)
            left -= nbytes
        else:
            inside.append(None)
            arrays.append(payload)
    packed: bytes = msgpack.packb((*message[:6], inside))
    return packed, arrays


def head_of(packed: Sequence[bytes]) -> bytes:
    """Return the head of messages that go together."""
    return b"".join((COUNT.pack(ARRAY_TYPE, len(packed)), *packed))


def parse(head: bytes) -> list[Message]:
    """Return the messages of a head, with None for the payloads that follow it.

    Raises ProtocolError for what is none.
    """
    try:
        found = msgpack.unpackb(head, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message of the parameter server cannot be read: {error}") from error
    if not isinstance(found, list):
        raise ProtocolError("the head of a frame of the parameter server has no messages")
    if len(found) > 1 and len(head) > COUNT.size + FRAME_BYTES:
        raise ProtocolError(f"it sent {len(found)} messages in one frame of {len(head)} bytes")
    return [_checked(fields) for fields in found]


def _checked(fields: Any) -> Message:
    if not isinstance(fields, list) or [*map(type, fields)] != FIELDS:
        raise ProtocolError("a message of the parameter server has wrong fields")
    kind, request, table, clock, incarnation, body, payloads = fields
    if kind not in KINDS or request < 0 or clock < 0 or incarnation < 0:
        raise ProtocolError(f"a message of the parameter server has the wrong kind {kind!r}")
    if payloads:
        if kind not in CARRIERS:
            raise ProtocolError(f"it sent {len(payloads)} arrays with {kind}")
        if any(type(payload) not in (bytes, type(None)) for payload in payloads):
            raise ProtocolError("a message of the parameter server has payloads of no bytes")
    return Message(kind, request, table, clock, incarnation, body, payloads or ())


def check_arrays(messages: Sequence[Message], count: int) -> None:
    """Raise ProtocolError where messages have more or fewer arrays than follow them."""
    if sum(message.payloads.count(None) for message in messages if message.payloads) != count:
        raise ProtocolError(f"its messages have other arrays than the {count} that it sent")


def with_arrays(messages: Sequence[Message], arrays: Sequence[Buffer]) -> Iterator[Message]:
    """Yield messages with all of their payloads.

    Raises ProtocolError where these are more or fewer than the arrays that follow.
    """
    check_arrays(messages, len(arrays))
    following = iter(arrays)
    for message in messages:
        if arrays and None in message.payloads:
            whole = [next(following) if each is None else each for each in message.payloads]
            yield message._replace(payloads=whole)
        else:
            yield message
