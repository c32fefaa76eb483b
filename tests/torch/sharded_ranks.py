"""Ranks as threads that run one sharded part, and the same part as one process.

The collectives are a few lines of lists and a barrier, so that only the plan, the graph and its
moves are under test.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.common.layouts.exchange import coarsest_mesh
from hvdlite.torch.sharding.distribution import layout_of_placements
from hvdlite.torch.sharding.graph.lowering import Lowering
from hvdlite.torch.sharding.meshes import nearest_placements
from hvdlite.torch.sharding.planning.planner import plan
from hvdlite.torch.sharding.planning.plans import Plan
from hvdlite.torch.sharding.shares import share_layout
from tests.limits import HANG_SECONDS


class Board:
    """Where the ranks put what they send."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.lock = threading.Lock()
        self.barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self.sent: dict[tuple[tuple[int, ...], int], Any] = {}
        self.received_bytes = [0] * ranks

    def exchange(self, members: tuple[int, ...], rank: int, value: Any) -> list[Any]:
        with self.lock:
            barrier = self.barriers.setdefault(members, threading.Barrier(len(members)))
        self.sent[members, rank] = value
        barrier.wait(HANG_SECONDS)
        found = [self.sent[members, each] for each in members]
        barrier.wait(HANG_SECONDS)
        return found

    def abort(self) -> None:
        with self.lock:
            for barrier in self.barriers.values():
                barrier.abort()


class ThreadCollectives:
    """The collectives of one of the threads."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.ranks = board, rank, board.ranks

    def join(self, members: tuple[int, ...]) -> None:
        assert self.rank in members

    def allreduce(
        self, tensor: Any, members: tuple[int, ...], maximum: bool = False, owned: bool = False
    ) -> Any:
        stacked = torch.stack(self.board.exchange(members, self.rank, tensor.detach().clone()))
        self._count(2 * tensor.nbytes * (len(members) - 1) // len(members))
        found = stacked.amax(0) if maximum else stacked.sum(0).to(tensor.dtype)
        return tensor.copy_(found) if owned else found

    def allgather(self, flat: Any, members: tuple[int, ...]) -> Any:
        self._count(flat.nbytes * (len(members) - 1))
        return torch.cat(self.board.exchange(members, self.rank, flat.detach().clone()))

    def reducescatter(self, flat: Any, members: tuple[int, ...]) -> Any:
        self._count(flat.nbytes * (len(members) - 1) // len(members))
        total = torch.stack(self.board.exchange(members, self.rank, flat.detach().clone())).sum(0)
        return total.chunk(len(members))[members.index(self.rank)].clone()

    def alltoall(
        self, flat: Any, sends: Sequence[int], receives: Sequence[int], members: tuple[int, ...]
    ) -> Any:
        parts = list(flat.detach().split(list(sends)))
        here = members.index(self.rank)
        came = [each[here] for each in self.board.exchange(members, self.rank, parts)]
        assert [each.numel() for each in came] == list(receives)
        self._count(sum(each.nbytes for i, each in enumerate(came) if i != here))
        return torch.cat(came)

    def _count(self, count: int) -> None:
        self.board.received_bytes[self.rank] += count


class Mesh:
    """As much of a mesh as plans and placements look at."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def size(self) -> int:
        return int(torch.tensor(self.shape).prod())


class Result:
    """What all ranks together have computed."""

    def __init__(self, found: Plan, mesh: tuple[int, ...], received_bytes: int) -> None:
        self.plan, self.mesh, self.received_bytes = found, mesh, received_bytes
        self.outputs: list[Any] = []
        self.gradients: dict[str, Any] = {}
        self.input_gradients: list[Any] = []
        self.buffers: dict[str, Any] = {}
        self.lowered: list[Any] = []


def run_sharded(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    strategies: Mapping[str, Any],
    ranks: int,
    loss: Callable[[Any, int], Any],
    mesh: tuple[int, ...] | None = None,
    seed: int = 0,
    **options: Any,
) -> Result:
    """Run a part with plain tensors of the whole batch; `loss` is told a rank's output."""
    found = plan(module, tuple(inputs), strategies, Mesh((ranks,)), **options)
    assert found.found is not None
    shape = mesh or coarsest_mesh(list(found.layouts.values()), ranks)
    parameters = dict(module.named_parameters())
    tensors = {**parameters, **dict(module.named_buffers())}
    held = {
        name: layout_of_placements(shape, nearest_placements(found.layouts[name], Mesh(shape)), t)
        for name, t in tensors.items()
    }
    board = Board(ranks)
    result = Result(found, shape, 0)
    outcomes: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            outcomes[rank] = _rank(rank)
        except BaseException as error:
            errors.append(error)
            board.abort()

    def _rank(rank: int) -> Any:
        assert found.found is not None
        lowered = Lowering(
            found.found.traced, found.found.operators, found.found.choices, held,
            ThreadCollectives(board, rank), torch.device("cpu"),
        ).run()  # fmt: skip
        lowered.seed.value = seed
        shares = [_part(each, share_layout(each.shape, ranks), rank) for each in inputs]
        leaves = {n: _part(tensors[n].detach(), held[n], rank) for n in lowered.leaves}
        for name, each in leaves.items():
            each.requires_grad_(tensors[name].requires_grad)
        for each in shares:
            each.requires_grad_(each.is_floating_point())
        outputs = lowered.graph(*shares, *leaves.values())
        total = sum(loss(each, rank) for each in outputs if each.requires_grad)
        if isinstance(total, torch.Tensor):
            total.backward()
        return lowered, outputs, leaves, shares

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    assert all(each is not None for each in outcomes), "a rank hangs"
    result.received_bytes = max(board.received_bytes)
    result.lowered = [each[0] for each in outcomes]
    result.outputs = [[each.detach() for each in outcome[1]] for outcome in outcomes]
    for name, tensor in tensors.items():
        parts = [outcome[2].get(name) for outcome in outcomes]
        if parts[0] is not None and name not in parameters:
            of_ranks = [each.double() for each in parts]  # NaN is not among integers.
            result.buffers[name] = _whole(of_ranks, held[name], tensor.double())
        if parts[0] is not None and parts[0].grad is not None:
            result.gradients[name] = _whole([p.grad for p in parts], held[name], tensor)
    for index, each in enumerate(inputs):
        if outcomes[0][3][index].grad is not None:
            parts = [outcome[3][index].grad / ranks for outcome in outcomes]
            result.input_gradients.append(torch.cat(parts) if each.ndim else parts[0])
    return result


def _part(tensor: Any, layout: Any, rank: int) -> Any:
    box = layout.box(tuple(tensor.shape), rank)
    return tensor[tuple(slice(*each) for each in box)].detach().clone()


def _whole(parts: Sequence[Any], layout: Any, like: Any) -> Any:
    """Put the parts together; ranks with the same part must have equal values."""
    whole = torch.full(tuple(like.shape), float("nan"), dtype=like.dtype)
    for rank, part in enumerate(parts):
        place = tuple(slice(*each) for each in layout.box(tuple(like.shape), rank))
        known = whole[place]
        torch.testing.assert_close(torch.where(known.isnan(), part, known), part)
        whole[place] = part
    assert not whole.isnan().any()
    return whole


def check_against_one_process(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    strategies: Mapping[str, Any],
    ranks: int,
    tolerance: float = 1e-10,
    **options: Any,
) -> Result:
    """Compare outputs and all gradients with those of the module itself, in float64."""
    alone = copy.deepcopy(module)
    own = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
    expected = alone(*own)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(e.shape, generator=generator, dtype=torch.float64) for e in expected]

    def loss(output: Any, rank: int) -> Any:
        index = losses[rank]
        losses[rank] += 1
        layout = share_layout(weights[index].shape, ranks)
        return (output * _part(weights[index], layout, rank)).sum()

    losses = [0] * ranks
    # A rank's loss of an output without a batch is a loss for each rank.
    total = sum(
        (each * weight).sum() * (1 / ranks if each.ndim else 1.0)
        for each, weight in zip(expected, weights, strict=True)
        if each.requires_grad
    )
    if isinstance(total, torch.Tensor):
        total.backward()
    result = run_sharded(module, inputs, strategies, ranks, loss, **options)

    def close(found: Any, wanted: Any, what: str) -> None:
        scale = max(1.0, wanted.abs().max().item() if wanted.numel() else 1.0)
        error = (found - wanted).abs().max().item() if wanted.numel() else 0.0
        assert error <= tolerance * scale, f"{what}: {error}\n{result.plan}"

    for index, each in enumerate(expected):
        for rank in range(ranks):
            share = _part(each, share_layout(each.shape, ranks), rank)
            found = result.outputs[rank][index]
            assert found.shape == share.shape, (found.shape, share.shape)
            close(found, share, f"output {index} of rank {rank}")
    for name, parameter in alone.named_parameters():
        if parameter.grad is not None:
            close(result.gradients[name], parameter.grad, f"the gradient of {name}")
    for name, buffer in alone.named_buffers():
        if name in result.buffers:
            close(result.buffers[name], buffer, f"the buffer {name}")
    wanted = [each.grad for each in own if each.grad is not None]
    for index, each in enumerate(wanted):
        close(result.input_gradients[index], each, f"the gradient of input {index}")
    return result
