"""The messages of a parameter server, as frames: a head of msgpack, then raw payloads.

| kind | from | answered by |
|---|---|---|
| hello | any -> scheduler | challenge; then, with a proof, welcome or refused |
| declare | worker -> scheduler | layout |
| beat | any -> scheduler | beat: who is alive, and the version of the layout |
| leave, barrier | worker -> scheduler | done |
| clocks | worker -> scheduler | done: it holds its pushes back, and says the step of each table |
| plan, ready, scale | server, server, worker -> scheduler | plan: what to send and take; done |
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
request that was made for an older layout; `unmapped` one whose payloads lie in memory that the
receiver does not see, so that it is sent again with them; `restarted` one to a server that does not
know the worker any more; `rolled_back` one for a step that the server has lost.

This module never sends. Nothing that arrives is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from hvdlite.common.base.errors import HorovodVersionMismatchError, ProtocolError

PROTOCOL = 4
KINDS = frozenset(
    {
        "hello", "challenge", "welcome", "refused", "declare", "layout", "beat", "leave",
        "barrier", "done",
        "start", "wanted", "offer", "started", "push", "pushed", "pull", "values", "push_rows",
        "pull_rows", "clocks", "plan", "stand", "ready", "scale", "take", "taken", "turn", "over",
        "save", "saved", "load", "loaded", "failed", "moved", "restarted", "rolled_back",
        "unmapped",
    }
)  # fmt: skip
MOST_HEAD_BYTES = 8 << 20
TAG_BYTES = 16  # Behind the head of a message from who has proved itself: see `admission`.
REPLACES = "replaces"  # In the body of an offer: see [Note: first values].

Buffer = bytes | bytearray | memoryview


class OtherProtocolError(ProtocolError):
    """A peer is another version of hvdlite, and speaks `protocol`."""

    def __init__(self, protocol: object) -> None:
        super().__init__(
            f"a message has the protocol {protocol!r} of the parameter server, and {PROTOCOL} is "
            "spoken here: install one version of hvdlite for all of its processes"
        )
        self.protocol = protocol


def version_mismatch(protocol: object) -> HorovodVersionMismatchError:
    """Return what a user hears of a peer that speaks another protocol."""
    name = "the parameter server of hvdlite with the protocol"
    return HorovodVersionMismatchError(name, str(protocol), str(PROTOCOL))


class Message(NamedTuple):
    """One message. `payloads` are raw bytes, whose meaning `body` or the layout tells."""

    kind: str
    request: int = 0
    table: str = ""
    clock: int = 0  # Of the worker in requests; the version in answers.
    # How often the server has started: in its answers. The version of the layout: in requests.
    incarnation: int = 0
    body: Mapping[str, Any] = {}
    payloads: Sequence[Buffer] = ()


class Answer(NamedTuple):
    """A message to a peer."""

    peer: bytes
    message: Message


def pack(message: Message) -> list[Buffer]:
    """Return the frames of a message."""
    head = (PROTOCOL, *message[:5], message.body)
    return [msgpack.packb(head), *message.payloads]


def parse(frames: Sequence[Buffer]) -> Message:
    """Return the message of these frames; raise ProtocolError for what is none.

    A tag behind the head is left out: who reads it looks at it before.
    """
    if not frames or len(frames[0]) > MOST_HEAD_BYTES:
        raise ProtocolError("a message of the parameter server has no head, or too large a one")
    try:
        head = _unpack(frames[0])
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message of the parameter server cannot be read: {error}") from error
    if not isinstance(head, list) or not head:
        raise ProtocolError("a message of the parameter server has no head")
    if head[0] != PROTOCOL:
        raise OtherProtocolError(head[0])
    if [type(field) for field in head] != [int, str, int, str, int, int, dict]:
        raise ProtocolError("the head of a message of the parameter server has wrong fields")
    _, kind, request, table, clock, incarnation, body = head
    if kind not in KINDS or min(request, clock, incarnation) < 0:
        raise ProtocolError(f"a message of the parameter server has the wrong kind {kind!r}")
    return Message(kind, request, table, clock, incarnation, body, tuple(frames[1:]))


def _unpack(frame: Buffer) -> Any:
    try:
        return msgpack.unpackb(frame, strict_map_key=True)
    except msgpack.ExtraData as error:
        if len(error.extra) != TAG_BYTES:
            raise
        return error.unpacked
