"""Gradients of PyTorch that go to servers during backward, and what may happen to them later."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.worker import early_sender
from hvdlite.ps.worker.early_sender import EarlySender
from hvdlite.ps.worker.shard import Shard
from hvdlite.torch import ps
from hvdlite.torch.ps.pushing_optimizer import BackwardFollower
from tests.ps.digits import batch, loss_of, network
from tests.ps.processes import cluster
from tests.ps.sites import Site

STEPS = 12


class Table:
    """Notes what comes early."""

    def __init__(self) -> None:
        self.came: list[tuple[int, bytes]] = []

    def push_early(self, tensor: int, gradient: Callable[[], Array]) -> None:
        self.came.append((tensor, gradient().tobytes()))


def test_gradients_come_last_layers_first_after_the_last_pass_of_a_step() -> None:
    model, table = network(), Table()
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    follower: BackwardFollower | None = BackwardFollower(parameters, table, passes=2)
    for number in range(2):
        assert not table.came
        loss_of(model, *batch(number, 0, 1)).backward()
    assert sorted(number for number, _ in table.came) == [1, 2, 3]
    assert table.came[-1][0] == 1  # the bias of the first layer
    for number, gradient in table.came:
        assert gradient == parameters[number].grad.numpy().tobytes()  # type: ignore[union-attr]
    loss_of(model, *batch(2, 0, 1)).backward()  # one pass more
    assert len(table.came) == 3
    assert follower is not None
    follower.end_step()
    for number in range(2):
        loss_of(model, *batch(number, 0, 1)).backward()
    assert len(table.came) == 6
    follower = None  # the hooks go with it
    assert all(not parameter._post_accumulate_grad_hooks for parameter in parameters[1:])


def step(model: nn.Module, number: int, worker: int) -> None:
    """Compute gradients; some are clipped, some scaled back, some of two backward passes."""
    model.zero_grad()
    loss_of(model, *batch(number, worker, 2)).backward()
    if number % 6 == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if number % 6 == 3:
        loss_of(model, *batch(number + 100, worker, 2)).backward()
    if number % 6 == 5:  # behind the back of autograd
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.01, 0.01)  # type: ignore[union-attr]


def train_far(folder: Path) -> None:
    """Train as on hosts of their own, where some pieces are lost; write weights and counts."""
    Listener.open_memory = lambda self: None  # type: ignore[method-assign]
    early_sender.LEAST_BYTES = 100
    push_piece, end = Shard.push_piece, EarlySender.end
    choose, count, whole = random.Random(3), 0, []

    def counted(self: Shard, body: Any, payload: Any) -> None:
        nonlocal count
        count += 1
        if choose.random() < 0.1:  # lost
            return
        push_piece(self, body, payload)

    def noted(self: EarlySender, tensors: Any) -> Any:
        found = end(self, tensors)
        whole.append(not found)
        return found

    Shard.push_piece = counted  # type: ignore[method-assign]
    EarlySender.end = noted  # type: ignore[method-assign]
    ps.init()
    model = network()
    optimizer = ps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    for number in range(STEPS):
        step(model, number, ps.rank())
        optimizer.step()
    torch.save(model.state_dict(), folder / f"worker{ps.rank()}.pt")
    print("pieces:", count, "whole:", [n for n, each in enumerate(whole) if each], flush=True)
    ps.shutdown()


def train_in_one() -> dict[str, Tensor]:
    model = network()
    alone = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(STEPS):
            totals: list[Tensor] = []
            for worker in range(2):
                step(model, number, worker)
                given = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                totals = [a + b for a, b in zip(totals, given, strict=True)] if totals else given
            for parameter, total in zip(model.parameters(), totals, strict=True):
                parameter.grad = total * 0.5
            alone.step()
    finally:
        torch.set_num_threads(threads)
    return model.state_dict()


def test_clipping_passes_and_lost_pieces_leave_the_run_bitwise_one_process(site: Site) -> None:
    with cluster(site, 2, 2, train_far) as job:
        assert not job.wait_for_all()
    wanted = train_in_one()
    for number in range(2):
        said, weights = job.said(f"worker{number}"), job.weights(number)
        assert "pieces: 36 " in said or "pieces: 48 " in said, said
        assert "whole: [1, 3, 5, 7, 9, 11]" in said
        assert all(torch.equal(weights[name], each) for name, each in wanted.items())
