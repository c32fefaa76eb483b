"""Optimizers of PyTorch whose steps servers make: what they send, hear and refuse."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdlite.common.base.errors import HorovodInternalError  # noqa: E402
from hvdlite.ps import context  # noqa: E402
from hvdlite.ps.layouts.blocks import Array, Block  # noqa: E402
from hvdlite.ps.layouts.layout import Part  # noqa: E402
from hvdlite.ps.tables.description import TableDescription  # noqa: E402
from hvdlite.ps.tables.updater import Updater  # noqa: E402
from hvdlite.torch import ps  # noqa: E402
from hvdlite.torch.ps.arrays import Target, flat_array_of  # noqa: E402
from hvdlite.torch.ps.embedding import PulledRows  # noqa: E402
from hvdlite.torch.ps.pushing_optimizer import FEW, SMALL_BYTES, Gradients  # noqa: E402
from hvdlite.torch.ps.updater import TorchRows, TorchUpdater  # noqa: E402
from tests.ps.cluster import LIMIT_SECONDS, NewCluster  # noqa: E402
from tests.ps.digits import OPTIMIZERS  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

Trains = Callable[[float], tuple[Any, Any, Any]]


@pytest.fixture
def settings(new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings of this process, which is the only worker of a cluster."""

    def updater_of(described: TableDescription) -> Updater:
        server = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], 0.5)
        if described.rows is not None:
            return TorchRows(context.new_store(described), server, server.param_groups[0])
        return TorchUpdater(server, described, whole=False)

    worker = new_cluster(1, 1, updater_of=updater_of).worker("worker 0", 0)
    found = SimpleNamespace(independent=True)
    monkeypatch.setattr(context, "role", lambda: "worker")
    monkeypatch.setattr(context, "worker", lambda: worker)
    monkeypatch.setattr(context, "current", lambda: SimpleNamespace(settings=found))
    return found


@pytest.fixture
def trains(settings: Any) -> Trains:
    """What makes a weight, rows beside it, and their optimizer with this rate, after two steps."""

    def make(rate: float) -> tuple[Any, Any, Any]:
        weight = torch.nn.Parameter(torch.zeros(4))
        embedding = torch.nn.Embedding(10, 4)
        ps.set_param_ps(embedding, init_in_server=True)
        named = [("weight", weight), ("rows", embedding.weight)]
        plain = torch.optim.SGD([weight, embedding.weight], rate)
        optimizer = ps.DistributedOptimizer(plain, named, parameters=["*"])
        for _ in range(2):
            step(weight, embedding, optimizer)
        return weight, embedding, optimizer

    return make


def step(weight: Any, embedding: Any, optimizer: Any) -> float:
    """Make a step with gradients of one; return how far the weight went."""
    before = weight[0].item()
    optimizer.zero_grad()
    (embedding(torch.tensor([1])).sum() + weight.sum()).backward()
    optimizer.step()
    return before - weight[0].item()


def lose_step(optimizer: Any) -> None:
    """Let servers go back from the second step to the first one."""
    table, gone = optimizer._table, threading.Event()
    error = ps.PsRolledBack("server 0 goes on from step 1", 1)
    table._client.call(lambda: (table._go_back(error), gone.set()))
    assert gone.wait(LIMIT_SECONDS)


@pytest.mark.parametrize("what", ["step", "save", "rows"])
def test_whatever_raises_a_rollback_reads_the_weights_anew(
    what: str, trains: Trains, tmp_path: Path
) -> None:
    weight, embedding, optimizer = trains(0.5)
    assert weight.tolist() == [-1.0] * 4
    with torch.no_grad():
        weight.fill_(7.0)  # As it was after the steps that are lost.
    call = {
        "step": optimizer.step,
        "save": lambda: context.save(tmp_path / "saved"),
        "rows": lambda: embedding(torch.tensor([1])),
    }[what]
    lose_step(optimizer)
    with pytest.raises(ps.PsRolledBack, match="from step 1"):
        call()
    assert weight.tolist() == [-0.5] * 4
    assert optimizer.finished_steps == 1
    if what != "step":
        optimizer.zero_grad()
    assert step(weight, embedding, optimizer) == 0.5, "it hears of it once"


def test_rows_that_do_not_fit_are_refused_before_any_table_has_the_step(
    trains: Trains, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, embedding, optimizer = trains(0.5)
    with monkeypatch.context() as patched:
        wrong = [np.array([1]), np.ones((1, 99), np.float32)]
        patched.setattr(PulledRows, "take", lambda _rows, _scale: wrong)
        with pytest.raises(ValueError, match="belong to 1 ids"):
            step(weight, embedding, optimizer)
    called = threading.Event()
    optimizer._table._client.call(called.set)
    assert called.wait(LIMIT_SECONDS)
    assert {table.clock for table in optimizer._tables} == {2}
    assert step(weight, embedding, optimizer) == 0.5


def test_servers_hear_of_a_rate_whose_step_was_lost(trains: Trains) -> None:
    """Those that have lost nothing drop the step that is made again, and what it says."""
    weight, embedding, optimizer = trains(0.5)
    optimizer.param_groups[0]["lr"] = 0.125
    lose_step(optimizer)
    with pytest.raises(ps.PsRolledBack):
        step(weight, embedding, optimizer)
    moves = [step(weight, embedding, optimizer) for _ in range(3)]
    assert moves == [0.5, 0.125, 0.125]  # The first one was made before.


def test_what_goes_by_allreduce_does_not_go_back(settings: Any) -> None:
    """It has made the steps that are lost: to go on would be to train two models."""
    settings.independent = False

    def main(_rank: int) -> None:
        weight, reduced = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
        plain = torch.optim.SGD([weight, reduced], 0.5)
        named = [("weight", weight), ("reduced", reduced)]
        optimizer = ps.DistributedOptimizer(plain, named, parameters=["weight"])
        for number in range(3):
            optimizer.zero_grad()
            (weight.sum() + reduced.sum()).backward()
            if number < 2:
                optimizer.step()
        lose_step(optimizer)
        with pytest.raises(HorovodInternalError, match="Go on from a checkpoint of all") as told:
            optimizer.step()
        assert not isinstance(told.value, ps.PsRolledBack)

    run_ranks(1, main)


def test_a_frozen_parameter_that_servers_decay_is_named(settings: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    frozen = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    plain = torch.optim.SGD([weight, frozen], 0.5, weight_decay=0.1)
    with pytest.warns(UserWarning, match=r"frozen is frozen \(1 in all\)"):
        ps.DistributedOptimizer(plain, [("weight", weight), ("frozen", frozen)])


def test_a_second_optimizer_is_refused(settings: Any) -> None:
    """A server knows the first of the script, and would step over both with that."""
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = ps.DistributedOptimizer(
        torch.optim.SGD(first.parameters(), 0.1), first.named_parameters()
    )
    before = copy.deepcopy(second.state_dict())
    plain = torch.optim.Adam(second.parameters(), 0.5)
    with pytest.raises(ValueError, match=r"has a ps\.DistributedOptimizer already"):
        ps.DistributedOptimizer(plain, second.named_parameters())
    assert all(torch.equal(second.state_dict()[name], before[name]) for name in before)
    first(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_a_parameter_without_gradient_that_servers_decay_is_named(settings: Any) -> None:
    weight, unused = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    plain = torch.optim.SGD([weight, unused], 0.5, weight_decay=0.1)
    optimizer = ps.DistributedOptimizer(plain, [("weight", weight), ("unused", unused)])
    for number in range(2):
        weight.sum().backward()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.step()
        assert [str(each.message).partition(" (1 in all)")[0] for each in told] == (
            [] if number else ["unused has no gradient in the first step"]
        )
    assert unused.tolist() == pytest.approx([0.95**2] * 4)


def test_weights_that_others_than_the_servers_have_changed_are_warned_of(trains: Trains) -> None:
    weight, embedding, optimizer = trains(0.5)
    before = weight.detach().clone()
    weight.data = weight.data.clone()
    with torch.no_grad():
        weight.copy_(before)  # As broadcast_parameters does, and whoever puts back what it took.
    assert step(weight, embedding, optimizer) == 0.5  # Warnings are errors here.
    with torch.no_grad():
        weight.fill_(9.0)
    with pytest.warns(UserWarning, match="weight has changed since the last step"):
        step(weight, embedding, optimizer)
    assert torch.equal(weight, before - 1.0)
    assert step(weight, embedding, optimizer) == 0.5


def test_what_is_loaded_or_added_later_and_never_reaches_servers_is_refused(trains: Trains) -> None:
    weight, embedding, optimizer = trains(0.5)
    plain = torch.optim.SGD([weight, embedding.weight], 0.1, momentum=0.9)
    state = plain.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.ones(4)}}
    with pytest.raises(ValueError, match=r"there is a state of weight \(momentum_buffer\)"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="give it all of them before"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    groups = optimizer.param_groups  # Which schedulers of the optimizer that was wrapped change.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert optimizer.param_groups is groups
    assert step(weight, embedding, optimizer) == 0.5


# -- gradients as flat arrays: many small ones, and whatever else parameters have

SHAPES = [(), (3,), (4, 5), (2, 3, 4), (SMALL_BYTES // 4 + 1,)]


def parameters(dtype: Any) -> list[Any]:
    """Return parameters with gradients, of which more than a few are small."""
    made = torch.Generator().manual_seed(3)
    found = []
    for number in range(FEW + 3):
        shape = SHAPES[number % len(SHAPES)]
        found.append(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        found[-1].grad = torch.randn(shape, generator=made).to(dtype)
    return found


def values(arrays: list[Array]) -> list[list[float]]:
    return [array.astype(np.float64).tolist() for array in arrays]


def wanted(own: list[Any]) -> list[list[float]]:
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in own]
    return [each.to_dense().double().reshape(-1).tolist() for each in gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_gradients_are_those_of_the_parameters_in_each_step(dtype: Any) -> None:
    own = parameters(dtype)
    gradients = Gradients(own)
    assert values(gradients.arrays(None)) == wanted(own)
    for each in own:  # New tensors, as after zero_grad(), and some that are not contiguous.
        assert each.grad is not None
        each.grad = each.grad * 2 if each.dim() < 2 else (each.grad * 2).mT.contiguous().mT
    assert values(gradients.arrays(None)) == wanted(own)
    own[0].grad = None
    assert values(gradients.arrays(None)) == wanted(own)
    own[1].grad = torch.ones(3, dtype=dtype).to_sparse()
    assert values(gradients.arrays(None)) == wanted(own)


def test_gradients_are_divided_by_a_scale() -> None:
    own = parameters(torch.float32)
    found = values(Gradients(own).arrays(torch.tensor(4.0)))
    assert found == [[value / 4 for value in each] for each in wanted(own)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scalar_is_a_tensor_of_one_element(dtype: Any) -> None:
    weight = torch.nn.Parameter(torch.tensor(2.0, dtype=dtype))
    target = Target(weight)
    assert values([flat_array_of(weight), target.array]) == [[2.0]] * 2
    target.array[0:1] = 3
    assert weight.item() == 3.0


def test_autograd_notices_weights_that_were_pulled() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    loss = sum((each * each).sum() for each in weights)
    assert isinstance(loss, torch.Tensor)
    Target.finish([Target(each) for each in weights])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_parts_of_tensors_lie_one_after_another_in_a_block(dtype: str) -> None:
    block = Block(dtype, 0, (Part(4, 1, 3, 0), Part(5, 0, 4, 0), Part(7, 2, 3, 0)))
    tensors = [np.arange(4) + 10 * number for number in range(4)]
    tensors = [each.astype(block.new().dtype) for each in tensors]
    into = block.new()
    block.gather(tensors, 4, into)
    assert into.astype(int).tolist() == [1, 2, 10, 11, 12, 13, 32]
    back = [np.zeros_like(each) for each in tensors]
    block.scatter(into, back, 4)
    assert [each.astype(int).tolist() for each in back] == [
        [0, 1, 2, 0], [10, 11, 12, 13], [0, 0, 0, 0], [0, 0, 32, 0],
    ]  # fmt: skip


# -- what is refused

WEIGHT = torch.nn.Parameter(torch.ones(3))
SGD = torch.optim.SGD([WEIGHT], lr=0.1)
NAMED = [("weight", WEIGHT)]
STEPPED = torch.optim.SGD([WEIGHT], lr=0.1, momentum=0.9)
STEPPED.state[WEIGHT]["momentum_buffer"] = torch.ones_like(WEIGHT)


@pytest.mark.parametrize(
    ("optimizer", "named", "words", "said"),
    [
        (SGD, NAMED, {"mode": "fast"}, "mode is 'fast', which is none of sync, async, ssp"),
        (SGD, NAMED, {"staleness": 2}, "staleness=2 bounds how far workers are apart in mode ssp"),
        (SGD, NAMED, {"mode": "ssp"}, "mode ssp needs a number of steps"),
        (SGD, NAMED, {"mode": "ssp", "staleness": True}, "staleness is True"),
        (SGD, NAMED, {"mode": "ssp", "staleness": -1}, "staleness is -1"),
        (SGD, NAMED, {"scale": "1/W"}, "leave it out, and give op=Average"),
        (SGD, NAMED, {"mode": "async", "scale": 0.5}, "scale is 0.5"),
        (SGD, NAMED, {"partition": "row"}, "partition is 'row'"),
        (SGD, NAMED, {"op": 4}, "a server averages what is pushed, or adds it up"),
        (SGD, NAMED, {"backward_passes_per_step": 0}, "must be > 0, not 0"),
        (SGD, NAMED, {"backward_passes_per_step": 1.5}, "must be a whole number, not 1.5"),
        (SGD, NAMED, {"parameters": "bias*"}, "parameters='bias\\*' is a text: give a list"),
        (SGD, NAMED, {"parameters": ["bias*"]}, "parameters='bias\\*' matches no name"),
        (SGD, NAMED * 2, {}, "must be unique. Found duplicates: weight"),
        (SGD, [WEIGHT], {}, "should be a sequence of tuples"),
        (SGD, [("other", torch.ones(2))], {}, "named_parameters lacks 1 of the 1 parameters"),
        (torch.optim.LBFGS([WEIGHT]), NAMED, {"partition": "tensor"}, "LBFGS looks at all"),
        (OPTIMIZERS["norms"]([WEIGHT]), NAMED, {}, "Give partition='tensor'"),
        (STEPPED, NAMED, {}, r"there is a state of weight \(momentum_buffer\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_the_call(
    optimizer: Any, named: Any, words: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ps.DistributedOptimizer(optimizer, named, **words)
