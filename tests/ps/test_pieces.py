"""Gradients that are sent while backward runs: the push is the same, or all of it is sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import Array, Block, TensorSpec, blocks_of
from hvdlite.ps.layouts.layout import place
from hvdlite.ps.tables.clocks import SYNC, Mode
from hvdlite.ps.tables.gradient_pieces import ATTEMPT, LAST, PIECE
from hvdlite.ps.tables.table import SKIP
from hvdlite.ps.worker import early_sender
from hvdlite.ps.worker.early_sender import EarlySender, rest_of
from hvdlite.ps.worker.shard import Shard
from tests.ps.cluster import (
    Cluster,
    NewCluster,
    Trainer,
    bits,
    gradients_of,
    in_threads,
    train_in_one,
    trainers,
    wait_until,
    with_one,
)
from tests.ps.test_scaling import both
from tests.ps.test_tables import begun, payloads, values_of

SIZES = [70, 3, 41]
SPECS = [TensorSpec(str(key), "float32", (size,)) for key, size in enumerate(SIZES)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_sender, "LEAST_BYTES", 84)


def cut(blocks: Sequence[Block], gradients: Sequence[Array]) -> list[memoryview]:
    arrays = [block.new() for block in blocks]
    for block, array in zip(blocks, arrays, strict=True):
        block.gather(gradients, 0, array)
    return [memoryview(array.view(np.uint8).data) for array in arrays]


def blocks_on(servers: int) -> list[list[Block]]:
    layout = place(SIZES, [4] * 3, servers, part_bytes=100)
    return [blocks_of(SPECS, 0, layout, server) for server in range(servers)]


# -- what is sent


def test_pieces_and_the_rest_are_the_push() -> None:
    blocks = blocks_on(2)
    sender = EarlySender(blocks, 0)
    gradients = [np.random.default_rng(n).normal(size=n).astype("f") for n in SIZES]
    got = [[np.full(block.size, np.nan, np.float32) for block in own] for own in blocks]

    def take(server: int, body: Any, data: Sequence[Any]) -> None:
        for (block, start), payload in zip(body[PIECE], data, strict=True):
            elements = np.frombuffer(payload, "f")
            assert np.isnan(got[server][block][start : start + elements.size]).all()
            got[server][block][start : start + elements.size] = elements

    count = 0
    for tensor in (2, 1, 0):
        for server, body, payload in sender.pieces_of(tensor, gradients[tensor], far=[0, 1]):
            take(server, body, [payload])
            count += 1
        assert not list(sender.pieces_of(tensor, gradients[tensor], far=[0, 1]))  # not twice
    assert count > 3
    gone = sender.end(gradients)
    wanted = [cut(own, gradients) for own in blocks]
    for server in (0, 1):
        take(server, *rest_of(blocks[server], gone[server], wanted[server]))
    assert [bits(own) for own in got] == [[bytes(each) for each in own] for own in wanted]


def test_a_gradient_that_was_changed_is_sent_whole_and_after_two_nothing_early() -> None:
    sender = EarlySender(blocks_on(1), 0)
    gradients = [np.ones(size, np.float32) for size in SIZES]

    def step(change: float) -> tuple[int, bool]:
        count = len(list(sender.pieces_of(2, gradients[2], far=[0])))
        gradients[2][0] += change
        return count, 0 in sender.end(gradients)

    assert [step(each) for each in (0, 1, np.nan, 0)] == [
        (1, True), (1, False), (1, False), (0, False)
    ]  # fmt: skip


def test_what_goes_to_this_host_is_not_sent_early_nor_after_a_skip() -> None:
    sender = EarlySender(blocks_on(2), 0)
    gradients = [np.ones(size, np.float32) for size in SIZES]
    for far in ([], [1]):
        sent = [each for n in range(3) for each in sender.pieces_of(n, gradients[n], far=far)]
        assert {server for server, _, _ in sent} == set(far)
        assert sender.end([]) == {}
    (first, *_) = sender.pieces_of(2, gradients[2], far=[0, 1])
    assert first[1][ATTEMPT] not in {body[ATTEMPT] for _, body, _ in sent}
    assert list(sender.end(gradients)) == [first[0]]


def test_tensors_of_one_block_come_in_two_threads() -> None:
    """The other thread sends all that it has while this one makes memory for the block."""
    (own,) = blocks_on(1)
    gradients = [np.arange(1, size + 1, dtype="f") for size in SIZES]
    made: list[Array] = []

    def new(block: Block) -> Array:
        made.append(array := np.zeros(block.size, block.dtype))
        if len(made) == 1:
            in_threads(lambda: send(0))
        return array

    def send(tensor: int) -> None:
        list(sender.pieces_of(tensor, gradients[tensor], far=[0]))

    sender = EarlySender([own], 0, new)
    send(2)
    assert len(made) == 2
    gone = sender.end(gradients)[0]
    assert len(gone.pieces) == 4
    (push,) = cut(own, gradients)
    wanted = np.frombuffer(push, np.float32)
    for _, start, stop in gone.pieces:
        assert bits([gone.arrays[0][start:stop]]) == bits([wanted[start:stop]])


# -- what a server makes of it

GIVEN = payloads(values_of(0, 0))  # Blocks of 5 and 6 elements of 4 and 2 bytes.
EARLY = Message("push", body={PIECE: [[0, 2]], ATTEMPT: 7}, payloads=[GIVEN[0][8:]])
FINAL = Message(
    "push", body={PIECE: [[0, 0], [1, 0]], ATTEMPT: 7, LAST: True},
    payloads=[GIVEN[0][:8], GIVEN[1]],
)  # fmt: skip
LATE = Message("push", body={PIECE: [[0, 0]], ATTEMPT: 6}, payloads=[bytes(20)])


@pytest.mark.parametrize(
    ("messages", "complete"),
    [
        ([EARLY, FINAL], True),
        ([EARLY, EARLY, FINAL, EARLY, FINAL], True),
        ([LATE, EARLY, FINAL], True),
        ([FINAL], False),
        ([EARLY, LATE, FINAL], False),
        ([EARLY._replace(body={PIECE: [[0, 2]], ATTEMPT: 6}), FINAL], False),
    ],
)
def test_a_server_takes_all_pieces_of_one_attempt_or_the_whole_push(
    messages: list[Message], complete: bool
) -> None:
    table, whole = begun(Mode(SYNC)), begun(Mode(SYNC))
    kinds = [table.push(b"0", 0, each)[0].message.kind for each in messages]
    assert kinds[-1] == ("pushed" if complete else "restarted")
    if not complete:
        table.push(b"0", 0, Message("push", payloads=GIVEN))
    whole.push(b"0", 0, Message("push", payloads=GIVEN))
    for each in (table, whole):
        each.push(b"1", 1, Message("push", payloads=payloads(values_of(0, 1))))
    assert table.version == whole.version == 1
    assert bits(table.updater.values()) == bits(whole.updater.values())


def test_pieces_of_a_step_that_is_skipped_are_forgotten() -> None:
    table = begun(Mode(SYNC), workers=1)
    table.push(b"0", 0, EARLY)
    assert table.push(b"0", 0, Message("push", body={SKIP: True}))[0].message.kind == "pushed"
    final = FINAL._replace(clock=1)
    assert table.push(b"0", 0, final)[0].message.kind == "restarted"
    assert table.version == 1


@pytest.mark.parametrize("place_", [[2, 0], [-1, 0], [0, -1], [0, 4]])
def test_a_piece_that_lies_in_no_block_is_refused(place_: list[int]) -> None:
    table = begun(Mode(SYNC))
    with pytest.raises(ValueError, match="piece is"):
        table.push(b"0", 0, Message("push", body={PIECE: [place_]}, payloads=[bytes(8)]))


def test_what_is_pulled_has_the_first_layers_first() -> None:
    for own in blocks_on(3):
        for block in own:
            places = [(part.key, part.start) for part in block.parts]
            assert places == sorted(places)


# -- in a cluster, without shared memory


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool]]:
    """Return what was sent: a piece or a push; the layout; whether it was less than a push.

    And what a server did not take: "restarted" or "moved".
    """
    found: list[tuple[str, int, bool]] = []
    push, push_piece, receive = Shard.push, Shard.push_piece, Shard.receive

    def noted_answer(self: Shard, message: Message) -> None:
        if message.kind in ("restarted", "moved", "failed"):
            found.append((message.kind, self.layout, False))
        receive(self, message)

    def noted_piece(self: Shard, *words: Any) -> None:
        found.append(("piece", self.layout, True))
        push_piece(self, *words)

    def noted(self: Shard, body: Any, payloads: Any, done: Any, rest: Any = None) -> None:
        found.append(("push", self.layout, rest is not None))
        push(self, body, payloads, done, rest)

    monkeypatch.setattr(Shard, "push", noted)
    monkeypatch.setattr(Shard, "push_piece", noted_piece)
    monkeypatch.setattr(Shard, "receive", noted_answer)
    monkeypatch.setattr(Listener, "open_memory", lambda self: None)
    return found


def cluster_keeps(cluster: Cluster, server: int, keys: set[int]) -> bool:
    return {part.key for part in cluster.state.registry.layout.parts_of(server)} == keys


def backward(trainer: Trainer, *tensors: int) -> None:
    for tensor in tensors:
        gradient = gradients_of(trainer.table.clock, trainer.worker.number)[tensor]
        trainer.table.push_early(tensor, lambda found=gradient: found)  # type: ignore[misc]


def end_step(trainer: Trainer) -> None:
    trainer.push()
    trainer.table.pull(trainer.values)


def train(trainer: Trainer, until: int) -> None:
    while trainer.table.clock < until:
        backward(trainer, 2, 1, 0)
        end_step(trainer)


def on_both(pair: Sequence[Trainer], main: Callable[[Trainer], None]) -> None:
    in_threads(*[lambda t=trainer: main(t) for trainer in pair])


def test_pushes_follow_their_pieces(
    new_cluster: NewCluster, sent: list[tuple[str, int, bool]]
) -> None:
    _, trainer = with_one(new_cluster, 2)
    train(trainer, 6)
    assert bits(trainer.values) == train_in_one(6, lambda _step: [0])
    assert {what for what, _, _ in sent} == {"piece", "push"}
    pushes = [what == "push" for what, _, _ in sent]
    runs = [(is_push, len([*run])) for is_push, run in itertools.groupby(pushes)]
    assert runs == [(False, 4), (True, 2)] * 6  # three parts of one tensor, and one of another
    assert all(less for _, _, less in sent)


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_come_and_go_in_the_middle_of_backward(
    new_cluster: NewCluster, sent: list[tuple[str, int, bool]], servers: int
) -> None:
    cluster = new_cluster(servers, 2)
    pair = first, second = trainers(cluster, 2)
    on_both(pair, lambda trainer: train(trainer, 4))
    for trainer in pair:
        backward(trainer, 2)
    if servers == 1:
        cluster.servers.append(cluster.start_server(1, joins=True))
    else:
        first.worker.scale_servers(1)
    wait_until(lambda: first.table.layout == 2)  # the other one may not have heard of it
    for trainer in pair:
        backward(trainer, 1, 0)
    on_both(pair, end_step)
    before = set(sent)
    del sent[:]
    on_both(pair, lambda trainer: train(trainer, 9))
    assert bits(first.values) == bits(second.values) == train_in_one(9, both)
    assert before >= {("piece", 1, True), ("push", 1, True)}
    assert set(sent) == {("piece", 2, True), ("push", 2, True)}


@pytest.mark.parametrize("returns", [False, True])
def test_a_server_is_lost_in_the_middle_of_backward(
    new_cluster: NewCluster, sent: list[tuple[str, int, bool]], returns: bool
) -> None:
    """It may be back before the other pieces come, or not yet."""
    cluster = new_cluster(2, 2, every=1)
    pair = first, second = trainers(cluster, 2)
    on_both(pair, lambda trainer: train(trainer, 4))
    links = [trainer.worker._servers[1] for trainer in pair]
    addresses = [link._address for link in links]
    for trainer in pair:
        backward(trainer, 2, 1)
    assert cluster_keeps(cluster, 1, {0, 1, 2})  # some parts went before, and some go after it
    cluster.restart_server(1)

    def is_back() -> bool:
        moved = all(link._address != old for link, old in zip(links, addresses, strict=True))
        return moved and all(trainer.table._shards[1]._started for trainer in pair)

    if returns:
        wait_until(is_back)
    for trainer in pair:
        backward(trainer, 0)
    on_both(pair, end_step)
    on_both(pair, lambda trainer: train(trainer, 9))
    assert bits(first.values) == bits(second.values) == train_in_one(9, both)
    assert [trainer.table._early[0].misses for trainer in pair] == [0, 0]


def test_a_server_that_is_lost_for_good_in_the_middle_of_backward_is_named(
    new_cluster: NewCluster, sent: list[tuple[str, int, bool]]
) -> None:
    cluster, trainer = with_one(new_cluster, 2, server_seconds=0.3)
    train(trainer, 2)
    backward(trainer, 2)
    cluster.servers[1].end()
    with pytest.raises(HorovodInternalError, match="server 1"):
        train(trainer, 9)
    with pytest.raises(HorovodInternalError, match="server 1"):
        train(trainer, 9)
