"""Small calls of a process group, which differ by their numbers alone, as short calls."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.collectives.native import short_call
from hvdlite.common.collectives.native.library import library
from hvdlite.common.runtime.current import current
from tests.common.engine.conftest import patient  # noqa: F401 - a fixture
from tests.ranks import run_ranks
from tests.short_calls import GATHER, short_calls, until, was_short
from tests.torch.process_group.test_groups import group_of_all

pytestmark = pytest.mark.skipif(library("auto") is None, reason="there is no C++ compiler")
SIZE = 3


def one_of_each(group: Any, rank: int, step: int) -> None:
    """Call every kind once and wait for it: a short call, with the result of this step."""
    mine = torch.full((2 + step % 2,), float(rank + step))
    total = mine.clone()
    was_short(lambda: group.allreduce(total).wait())
    assert total.tolist() == [SIZE * step + 3.0] * len(mine)
    whole = torch.empty(SIZE * len(mine))
    was_short(lambda: group.all_gather_single(whole, mine).wait())
    assert whole.view(SIZE, -1)[:, 0].tolist() == [step, step + 1, step + 2]
    copied = mine.clone()
    was_short(lambda: group.broadcast(copied, 1).wait())
    assert copied.tolist() == [step + 1.0] * len(mine)
    part = torch.empty(len(mine))
    was_short(lambda: group.reduce_scatter_single(part, whole).wait())
    assert part.tolist() == [SIZE * (rank + step)] * len(mine)
    sent = torch.arange(3 * SIZE).view(SIZE, 3) + 100 * rank + step
    came = torch.empty_like(sent)
    was_short(lambda: group.all_to_all_single(came, sent).wait())
    assert came[:, 0].tolist() == [3 * rank + step + 100 * other for other in range(SIZE)]
    was_short(lambda: group.barrier().wait())


@pytest.mark.usefixtures("patient")
def test_every_kind_with_every_number() -> None:
    def main(rank: int) -> None:
        hvd.barrier()
        group = group_of_all()
        for step in range(6):
            one_of_each(group, rank, step)

    run_ranks(SIZE, main, config=GATHER)


def test_only_the_same_number_meets() -> None:
    """One rank waits for a call while the other one waits for the next one like it."""

    def main(rank: int) -> None:
        group = group_of_all()
        for step in range(0, 40, 2):
            first, second = torch.tensor([1.0 + step]), torch.tensor([2.0 + step])
            early = group.allreduce(first)
            if rank == step // 2 % 2:
                current().engine._inbox.hurry()
                until(lambda: not current().engine._inbox._entries)
            else:
                early.wait()
            group.allreduce(second).wait()
            early.wait()
            assert [first.item(), second.item()] == [2 + 2 * step, 4 + 2 * step]

    run_ranks(2, main)


def messages(group: Any, rank: int) -> None:
    for step in range(40):
        tensor = torch.full((3,), float(step if rank == step % 2 else -1))
        if rank == step % 2:
            group.send(tensor, 1 - rank).wait()
        else:
            group.recv(tensor, 1 - rank).wait()
        assert tensor.tolist() == [step] * 3


@pytest.mark.usefixtures("patient")
def test_messages_of_one_kind_are_short_one_after_the_other() -> None:
    def main(rank: int) -> None:
        hvd.barrier()
        before = short_calls().completed
        messages(group_of_all(), rank)
        assert short_calls().completed - before == 40

    run_ranks(2, main, config=GATHER)


def test_a_message_that_is_not_waited_for_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who reports a message tells the other side, which else waits out the limit."""
    monkeypatch.setattr(short_call, "TIMEOUT_SECONDS", 40.0)

    def main(rank: int) -> None:
        hvd.barrier()
        group = group_of_all()
        start = time.monotonic()
        for step in range(60):
            tensor = torch.full((3,), float(step))
            if rank == step % 2:
                work = group.send(tensor, 1 - rank)
                work.get_future().wait()
            else:
                group.recv(tensor.fill_(-1), 1 - rank).wait()
                assert tensor.tolist() == [step] * 3
        assert time.monotonic() - start < 40

    run_ranks(2, main)


@pytest.mark.usefixtures("patient")
def test_a_process_set_that_changes_makes_calls_anew() -> None:
    """What was prepared before is of no use after: its members may be others."""

    def main(rank: int) -> None:
        hvd.barrier()
        group = group_of_all()
        for _ in range(2):
            one_of_each(group, rank, 1)
            some = hvd.add_process_set([0, 1])
            hvd.remove_process_set(some)
            hvd.barrier()

    run_ranks(SIZE, main, config=GATHER)
