"""A job that goes on from a checkpoint of rank 0: every optimizer of torch, kernel and layout."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from tests.ranks import run_ranks

SIZE = 2
Tensor = torch.Tensor
State = dict[str, Any]
# Without them an optimizer would keep less state than it can, or none.
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
}
LEFT_OUT = {
    "Optimizer": "the base class",
    "LBFGS": "its state belongs to no parameter: it is refused, which test_functions shows",
    "SparseAdam": "it takes sparse gradients only, and has a test of its own below",
}
KERNELS = ("default", "foreach", "fused")
LAYOUTS = ("contiguous", "channels_last")


def optimizer_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """All of torch.optim."""
    named = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return {
        name: each
        for name, each in named.items()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
    }


def cases() -> Iterator[tuple[str, str, str, bool]]:
    """Optimizer, kernel, layout, and whether it is wrapped before the broadcast."""
    for name, cls in optimizer_classes().items():
        if name in LEFT_OUT:
            continue
        options = inspect.signature(cls).parameters
        for number, kernel in enumerate(KERNELS):
            if kernel == "default" or kernel in options:
                for place, layout in enumerate(LAYOUTS):
                    yield name, kernel, layout, (number + place) % 2 == 0


def parameters(seed: int, name: str, layout: str) -> list[nn.Parameter]:
    """Weights of a convolution and its bias; of a matrix for Muon, which takes nothing else."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, 2, 2, generator=generator)
    if name == "Muon":
        weight = weight.reshape(4, 12)
        return [nn.Parameter(weight.T if layout == "channels_last" else weight)]
    if layout == "channels_last":
        weight = weight.to(memory_format=torch.channels_last)
    return [nn.Parameter(weight), nn.Parameter(torch.randn(4, generator=generator))]


def make(name: str, kernel: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    chosen = {} if kernel == "default" else {kernel: True}
    return optimizer_classes()[name](params, **OPTIONS.get(name, {}), **chosen)


def step(optimizer: Any, params: list[nn.Parameter], seed: int) -> None:
    """One step by gradients that backward makes; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    loss = torch.zeros(())
    for each in params:
        loss = loss + (each * torch.randn(each.shape, generator=generator)).square().sum()
    loss.backward()
    optimizer.step()


def checkpoint(name: str, kernel: str, layout: str) -> tuple[list[Tensor], State]:
    """Weights and state after two steps of one process."""
    params = parameters(0, name, layout)
    optimizer = make(name, kernel, params)
    for seed in (1, 2):
        step(optimizer, params, seed)
    optimizer.param_groups[0]["lr"] = 0.25
    return [each.detach() for each in params], copy.deepcopy(optimizer.state_dict())


def load(optimizer: Any, params: list[nn.Parameter], saved: tuple[list[Tensor], State]) -> None:
    weights, state = saved
    with torch.no_grad():
        for each, weight in zip(params, weights, strict=True):
            each.copy_(weight)
    optimizer.load_state_dict(copy.deepcopy(state))


def tensors(value: Any, path: str = "") -> dict[str, Tensor]:
    """All tensors of a state, by their places."""
    if isinstance(value, Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else ()
    return {key: t for k, each in items for key, t in tensors(each, f"{path}.{k}").items()}


def assert_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same bits in the same layout."""
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        other = theirs[name]
        assert one.dtype == other.dtype, name
        assert one.stride() == other.stride(), name
        assert torch.equal(one, other), name


def picture(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> dict[str, Tensor]:
    state = tensors(copy.deepcopy(optimizer.state_dict()["state"]))
    weights = {f"weight {n}": each.detach().clone() for n, each in enumerate(params)}
    return {**state, **weights}


def test_every_optimizer_of_torch_is_tried_or_left_out_for_a_reason() -> None:
    assert {name for name, *_ in cases()} | LEFT_OUT.keys() == optimizer_classes().keys()
    assert ("AdamW", "fused", "channels_last", False) in cases()


@pytest.mark.parametrize(("name", "kernel", "layout", "wrap_first"), [*cases()])
def test_ranks_go_on_as_one_process_would(
    name: str, kernel: str, layout: str, wrap_first: bool
) -> None:
    saved = checkpoint(name, kernel, layout)
    params = parameters(9, name, layout)
    alone = make(name, kernel, params)
    load(alone, params, saved)
    step(alone, params, 3)
    expected = picture(alone, params)
    assert tensors(alone.state_dict()["state"]), "there is no state to compare"

    def main(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        params = parameters(10 + rank, name, layout)
        optimizer: Any = make(name, kernel, params)
        if wrap_first:
            optimizer = hvd.DistributedOptimizer(optimizer)
        if rank == 0:
            load(optimizer, params, saved)
        hvd.broadcast_parameters([*params], root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.25
        received = picture(optimizer, params)
        if not wrap_first:
            optimizer = hvd.DistributedOptimizer(optimizer)
        step(optimizer, params, 3)
        return received, picture(optimizer, params)

    (first, _), *_ = ranks = run_ranks(SIZE, main)
    for received, after in ranks:
        assert_alike(received, first)
        assert_alike(after, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_rank_whose_weights_lie_in_another_order_than_the_roots(kernel: str) -> None:
    saved = checkpoint("AdamW", kernel, "channels_last")

    def main(rank: int) -> dict[str, Tensor]:
        params = parameters(rank, "AdamW", "contiguous" if rank else "channels_last")
        optimizer: Any = make("AdamW", kernel, params)
        if rank == 0:
            load(optimizer, params, saved)
        hvd.broadcast_parameters([*params], root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for each in params:
            assert optimizer.state[each]["exp_avg"].stride() == each.stride()
        optimizer = hvd.DistributedOptimizer(optimizer)
        step(optimizer, params, 3)
        return picture(optimizer, params)

    first, second = run_ranks(SIZE, main)
    for key, tensor in first.items():
        torch.testing.assert_close(second[key], tensor, rtol=1e-6, atol=1e-7)


VARIANTS: dict[str, State] = {
    "in place": {},
    "compressed": {"compression": hvd.Compression.bf16},
    "views": {"gradient_as_bucket_view": True},
    "over segments": {"fuse_all_optimizer_ops": True},
    "in groups": {"groups": 2},
    "adasum": {"op": hvd.Adasum},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_keep_the_layout_of_their_weights(variant: str) -> None:
    def train(rank: int | None) -> tuple[dict[str, Tensor], list[Any]]:
        params = parameters(0, "AdamW", "channels_last")
        unused = nn.Parameter(params[0].detach().clone())
        optimizer: Any = make("AdamW", "fused", [*params, unused])
        if rank is not None:
            optimizer = hvd.DistributedOptimizer(optimizer, **VARIANTS[variant])
        strides = []
        for seed in range(4):
            used = [*params, unused] if rank != 1 else params  # zeros stand in for its gradient
            scale = 2.0 if rank == 0 else 1.0  # of what rank 1 has not
            step_exactly(optimizer, {id(unused): scale}, used, seed)
            strides.append([each.grad.stride() for each in params if each.grad is not None])
            strides.append([each.stride() for each in [*params, unused]])
        return picture(optimizer, [*params, unused]), strides

    expected, strides = train(None)
    (first, _), *_ = ranks = run_ranks(SIZE, train)
    for state, own in ranks:
        assert own == strides
        if variant == "adasum":  # each rank has a state of its own, and all have the same weights
            weights = {key: each for key, each in state.items() if "weight" in key}
            assert_alike(weights, {key: first[key] for key in weights})
        else:
            assert_alike(state, first)
            torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)


def step_exactly(
    optimizer: Any, scales: dict[int, float], used: list[nn.Parameter], seed: int
) -> None:
    """A step by gradients that the cast to 16 bits does not change."""
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    loss = torch.zeros(())
    for each in used:
        whole = torch.randint(-8, 8, each.shape, generator=generator)
        loss = loss + (each * whole).sum() * scales.get(id(each), 1.0)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("form", ["allreduce", "broadcast", "grouped_allreduce"])
def test_new_tensors_have_the_layout_of_their_inputs(form: str) -> None:
    def main(rank: int) -> None:
        image = (torch.arange(24.0) + rank).reshape(1, 2, 3, 4)
        for given in (
            image,
            image.to(memory_format=torch.channels_last),
            image[0, 0].T,
            image[0, :, 1],
            torch.tensor([1.0 + rank]).expand(3),
        ):
            arguments: State = {"op": hvd.Max} if "allreduce" in form else {"root_rank": 1}
            tensors: Any = [given] if form.startswith("grouped") else given
            result: Any = getattr(hvd, form)(tensors, **arguments)
            (result,) = result if form.startswith("grouped") else [result]
            assert result.stride() == torch.empty_like(given).stride()
            assert torch.equal(result, given + (1 - rank))

    run_ranks(SIZE, main)


def odd_state(fill: float) -> State:
    """All that an optimizer of somebody's own might keep."""
    whole = torch.arange(24.0).reshape(4, 6) + fill
    halves = torch.zeros(8) + fill
    count = torch.tensor(fill)
    return {
        "transposed": whole.T.clone(memory_format=torch.preserve_format),
        "with gaps": whole[:, 1::2],
        "row of the same": whole[2],
        "expanded": torch.tensor([fill, 2.0]).unsqueeze(1).expand(2, 5),
        "first half": halves[:5],
        "second half": halves[3:],
        "other dtype": halves.view(torch.int32)[4:6],
        "scalar": count,
        "the same scalar": count,
        "empty": torch.empty(0, 3),
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[1, 3]]), torch.tensor([fill, 2]), (5,), check_invariants=False
        ),
        "complex": torch.tensor([1 + 2j, fill]).conj(),
        "negative": torch.tensor([1 + 2j, fill]).conj().imag,
        "half": torch.tensor([fill, 1], dtype=torch.bfloat16),
        "eighth": torch.tensor([fill, 1]).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "parameter": nn.Parameter(whole.T.contiguous().T),
        "number": fill,
        "text": "x",
        "nested": [{"deep": whole.T}, (None, fill)],
        "function": len,
    }


def test_state_of_any_form() -> None:
    def main(rank: int) -> State:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight])
        if rank == 1:
            optimizer.state[weight] = odd_state(3.0)
            optimizer.state["of nobody"] = torch.ones(2)  # type: ignore[index]
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert torch.equal(optimizer.state["of nobody"], torch.ones(2))  # type: ignore[index]
        return dict(optimizer.state[weight])

    received, own = run_ranks(SIZE, main)
    expected = odd_state(3.0)
    for state in (received, own):
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            if isinstance(value, Tensor):
                assert type(state[key]) is type(value), key
                assert state[key].dtype == value.dtype, key
                assert torch.equal(dense(state[key]), dense(value)), key
                if value.layout is torch.strided and not value.is_neg():  # which is resolved
                    assert state[key].stride() == value.stride(), key
        assert state["function"] is len
        assert (state["number"], state["text"]) == (3.0, "x")
        assert torch.equal(state["nested"][0]["deep"], expected["nested"][0]["deep"])
        assert state["nested"][1] == (None, 3.0)
        state["row of the same"].fill_(-1)  # what shared memory goes on sharing it
        assert state["with gaps"][2].tolist() == [-1, -1, -1]
        assert state["nested"][0]["deep"][:, 2].tolist() == [-1] * 6
        state["second half"][0] = -5
        assert state["first half"][3] == -5
        state["scalar"].add_(1)
        assert state["the same scalar"] == 4


def dense(tensor: Tensor) -> Tensor:
    """The values, in a form that can be compared."""
    whole = tensor.to_dense() if tensor.is_sparse else tensor
    return whole.float() if whole.dtype.is_floating_point else whole


def test_sparse_adam() -> None:
    def main(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(rank)
        table = nn.Embedding(6, 2, sparse=True)
        optimizer: Any = torch.optim.SparseAdam(table.parameters())
        if rank == 0:
            table(torch.tensor([1, 2])).square().sum().backward()
            optimizer.step()
        hvd.broadcast_parameters(table.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=table)
        optimizer = hvd.DistributedOptimizer(optimizer)
        optimizer.zero_grad()
        table(torch.tensor([rank, 4])).square().sum().backward()
        optimizer.step()
        return picture(optimizer, [table.weight])

    first, second = run_ranks(SIZE, main)
    assert len(first) > 1
    assert_alike(second, first)


def test_a_learning_rate_that_all_groups_share_stays_one_tensor() -> None:
    def main(rank: int) -> None:
        rate = torch.tensor(0.5 / (rank + 1))
        groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
        optimizer = torch.optim.Adam(groups, lr=rate)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert [float(each) for each in rates] == [0.5, 0.5]
        assert rates[0] is rates[1]

    run_ranks(SIZE, main)
