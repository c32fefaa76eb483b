"""Messages survive the wire, and foreign data is an error that names the sender."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.requests.messages import (
    Abort,
    Capabilities,
    Carried,
    ClockReply,
    Depart,
    Departed,
    DeviceRuns,
    Eviction,
    Figures,
    LauncherOrder,
    Message,
    Orders,
    Report,
    Reports,
    Response,
    Retune,
    Segment,
    StackQuery,
    StackReply,
    WaitQuery,
    WaitReply,
    decode,
    encode,
)
from tests.common.decisions.requests import request

MESSAGES: list[Message] = [
    Reports((Report(0, (1, 2), (4,), (), (Carried(4, 1, b"\x00\xff"), Carried(4, 2, b""))),)),
    Orders((Segment(0, (4,), b"\x01\x80"),)),
    Reports((Report(3, (1, 2, 5), (0, 1, 2, 7), (request("a", 3, group="g", group_size=2),)),)),
    Orders(
        (Segment(0, (5, Response(request("a"), (1, 2), 4, "", 1))), Eviction(1, 2), Departed(3))
    ),
    Orders((Retune(1 << 20, 2.5, 0, "ring", 1 << 18),)),
    Orders((Figures((0.5, 1e-9)),)),
    Orders((DeviceRuns(("cuda NCCL broadcast float32 -",)),)),
    Capabilities(2, ("cuda NCCL allreduce float32 SUM",)),
    Abort(-1, "reason"),
    Depart(2),
    Depart(2, "has ended by ValueError"),
    StackQuery((1, 2)),
    StackReply(1, "text"),
    WaitQuery(1, (0, 2)),
    WaitReply(1, 2, ("a",), ("script.py, line 3",), (1,)),
    WaitReply(3, 2, (), (), ()),
    LauncherOrder(-1, '[0,"count"]'),
    LauncherOrder(3, '[1,"stack"]', 1),
    ClockReply(1, 10**18, -5),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode(encode(message), 1) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1",
        msgpack.packb((99, ())),
        msgpack.packb((-1, ())),
        msgpack.packb((0, ((0, (0, 1 << 60), (), ()),))),
        msgpack.packb((0, ((0, (1 << 40, 1), (), ()),))),  # no rank
        msgpack.packb((0, ((0, (0, 1), (5, 1, 3, 1), ()),))),  # descending
        msgpack.packb((0, ((0, (0, 1), (0, 0), ()),))),
        msgpack.packb((0, ((0, (0, 1), (0,), ()),))),
        msgpack.packb((0, ((0, (0, 1), (), (("too short",),)),))),
        msgpack.packb((1, ((0, (0, ("not an item",))),))),
        msgpack.packb((1, ((3, (1 << 20, float("nan"), 0, "ring", 1 << 18)),))),
        msgpack.packb((1, ((4, ((1.0, -1.0),)),))),
        msgpack.packb((1, ((4, ("fast",)),))),
        msgpack.packb((1, ((3, (1 << 20, -1.0, 0, "ring", 1 << 18)),))),
        msgpack.packb((1, ((3, (1 << 20, 2.5, 0, "mpi", 1 << 18)),))),
        msgpack.packb((1, ((3, (1 << 20, 2.5, 0, "ring", 0)),))),
        msgpack.packb((1, ((3, (1 << 20, 2.5, 0, ["ring"], 1 << 18)),))),
        msgpack.packb((2, ("rank", 5))),
        encode(MESSAGES[0])[:-1],
    ],
)
def test_a_foreign_message_is_an_error_that_names_the_sender(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 7 sent a control message"):
        decode(data, 7)


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_no_bytes_do_more_than_raise_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(data, 0)
