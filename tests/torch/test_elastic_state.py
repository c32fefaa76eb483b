"""`TorchState` in a job without a driver: save, restore and sync of everything it can hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.base.host_update import HostUpdateResult
from hvdlite.common.elastic import run as elastic_run
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.current import find
from hvdlite.torch.elastic import handlers
from hvdlite.torch.elastic.sampler import ElasticSampler
from hvdlite.torch.elastic.state import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)
from tests.ranks import run_ranks
from tests.torch.on_ranks import on_ranks


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def weights(model: nn.Module) -> list[float]:
    return sorted({float(v) for p in model.parameters() for v in p.detach().reshape(-1)})


def adam(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, **options)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters())


def step(model: nn.Module, optimizer: Any, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.ones(2, 3)).square().sum() * factor).backward()
    optimizer.step()


@on_ranks(3)
def test_the_vectors_of_a_state(rank: int) -> None:
    model = nn.Linear(3, 2)
    fill(model, rank or 0.5)
    state = TorchState(model=model, optimizer=adam(model), step=7 + rank, round=3 + rank)
    state.sync()
    assert (weights(model), state.step, state.round) == ([0.5], 7, 3)
    fill(model, 9.0)
    state.step, state.round = 8, 4
    state.restore()
    assert (weights(model), state.step, state.round) == ([0.5], 7, 3)
    fill(model, 9.0)
    state.step, state.round = 8, 4
    state.commit()
    fill(model, 1.0)
    state.step = state.round = 0
    state.restore()
    assert (weights(model), state.step, state.round) == ([9.0], 8, 4)


@on_ranks(2)
def test_a_sync_ends_in_a_save(rank: int) -> None:
    model = nn.Linear(3, 2)
    fill(model, rank or 0.5)
    state = TorchState(model, best=[rank])
    state.sync()
    fill(model, 7.0)
    state.best.append("changed in place")
    state.restore()
    assert weights(model) == [0.5] and state.best == [0]


@on_ranks(2)
def test_an_optimizer_goes_on_bit_by_bit_after_a_restore(rank: int) -> None:
    """The oracle is the same training without an interruption."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    twin = copy.deepcopy(model)
    expected, optimizer = adam(twin), adam(model)
    state = TorchState(model, optimizer)
    data = torch.randn(6, 4, 3, dtype=torch.float64)

    def train(m: nn.Module, o: Any, number: int) -> None:
        o.zero_grad()
        m(data[number]).square().sum().backward()
        o.step()

    for number in range(3):
        train(twin, expected, number)
        train(model, optimizer, number)
    state.commit()
    for number in (5, 4):
        train(model, optimizer, number)
    model(data[0]).sum().backward()  # gradients that nobody waits for
    state.restore()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    for number in range(3, 6):
        train(twin, expected, number)
        train(model, optimizer, number)
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(left, right)


@on_ranks(2)
def test_groups_that_were_added_since_the_commit_are_added_again(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    twin = copy.deepcopy(model)
    expected, optimizer = (
        hvd.DistributedOptimizer(torch.optim.SGD(each[0].parameters(), 0.1, momentum=0.9))
        for each in (twin, model)
    )
    state = TorchState(model, optimizer)

    def thaw_and_train(m: Any, o: Any) -> None:
        o.add_param_group({"params": m[1].parameters(), "lr": 0.01})
        step(m, o)
        step(m, o)

    step(model, optimizer)
    step(twin, expected)
    state.commit()
    thaw_and_train(model, optimizer)
    state.restore()
    thaw_and_train(model, optimizer)
    thaw_and_train(twin, expected)
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(left, right)


@on_ranks(1)
def test_saved_state_of_another_dtype_is_not_rounded(rank: int) -> None:
    """torch's load_state_dict gives state the dtype of its parameter."""
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    third = torch.full((2, 3), 1 / 3, dtype=torch.float32)
    optimizer.state[model.weight]["momentum_buffer"] = third.clone()
    state = TorchState(model, optimizer)
    optimizer.state[model.weight]["momentum_buffer"].zero_()
    state.restore()
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], third)


@on_ranks(1)
def test_saves_keep_their_memory(rank: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = adam(model)
    state = TorchState(model, optimizer)
    step(model, optimizer)
    state.save()
    kept = [
        copies.data_ptr()
        for name in ("model", "optimizer")
        for copies in state._handlers[name]._saved._copies
    ]
    assert len(kept) == 2 + 2 * 3
    step(model, optimizer)
    state.save()
    assert kept == [
        copies.data_ptr()
        for name in ("model", "optimizer")
        for copies in state._handlers[name]._saved._copies
    ]


@on_ranks(2)
def test_ranks_without_optimizer_state_receive_it(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    optimizer = adam(model, amsgrad=True)
    if rank == 1:  # the others come in later
        optimizer.state.clear()
    local = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), amsgrad=True)
    if rank == 0:
        step(model, local)
    state = TorchState(model, local)
    state.sync()
    sent = hvd.allgather_object(copy.deepcopy((local.state_dict(), model.state_dict())))
    for other in sent:
        assert other[0]["param_groups"][0]["lr"] == 0.1
        assert torch.equal(other[0]["state"][0]["exp_avg"], sent[0][0]["state"][0]["exp_avg"])
        assert torch.equal(other[1]["weight"], sent[0][1]["weight"])
    assert sent[1][0]["state"][0]["step"] == 1


def test_a_sync_sends_one_buffer_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[str]] = [[], []]

    def main(rank: int) -> None:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)), nn.BatchNorm1d(3))
        model[0].half()
        torch.manual_seed(rank)
        state = TorchState(model)
        original = hvd.broadcast_

        def count(tensor: Any, root: int, name: str, process_set: Any) -> Any:
            sent[rank].append(name)
            return original(tensor, root, name, process_set)

        with monkeypatch.context() as patch:
            patch.setattr("hvdlite.torch.mpi_ops.broadcast_", count)
            hvd.barrier()
            state.sync()
            hvd.barrier()

    run_ranks(1, main)
    assert sorted(set(sent[0])) == [
        "elastic.model.float16.0", "elastic.model.float32.0", "elastic.model.int64.0",
    ]  # fmt: skip


def test_flat_buffers_carry_every_dtype_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.common.elastic.arrays.PIECE_BYTES", 64)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
    dtypes += [torch.complex64, torch.float8_e4m3fn]

    class Holder(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            random = torch.Generator().manual_seed(seed)  # Threads share torch's own.
            for number, dtype in enumerate(dtypes):
                for part in range(3):
                    values = (torch.randn(3, 5, generator=random) * 3).to(dtype)
                    if seed and part == 1:
                        values = values.t().contiguous().t()  # another layout on other ranks
                    self.register_buffer(f"b{number}_{part}", values)
            self.register_buffer("empty", torch.zeros(0, 4))
            self.register_buffer("scalar", torch.tensor(float(seed)))

    def main(rank: int) -> None:
        model = Holder(rank)
        TorchState(model).sync()
        for name, value in Holder(0).state_dict().items():
            found = model.state_dict()[name]
            same = found.contiguous().view(torch.uint8) if found.dim() else found
            wanted = value.contiguous().view(torch.uint8) if value.dim() else value
            assert torch.equal(same, wanted), name

    run_ranks(2, main)


def test_different_models_are_named_on_all_ranks() -> None:
    def main(rank: int) -> str:
        model = nn.Linear(3, 2 + (rank == 2))
        with pytest.raises(ValueError, match="the state's model") as error:
            TorchState(model).sync()
        return str(error.value)

    texts = run_ranks(3, main)
    assert len(set(texts)) == 1
    assert "tensor 'weight' is float32 of shape (2, 3) on rank 0" in texts[0]
    assert "float32 of shape (3, 3) on rank 2" in texts[0]


@on_ranks(2)
def test_any_number_of_models_under_any_name(rank: int) -> None:
    left, right, none = nn.Linear(2, 2), nn.Linear(2, 2), None
    fill(left, rank)
    fill(right, 10 + rank)
    state = TorchState(left=left, right=right, optimizer=none, sampler=none)
    assert (state.model, state.optimizer, state.sampler) == (None, None, None)
    state.sync()
    assert (weights(left), weights(right)) == ([0.0], [10.0])
    other = nn.Linear(4, 4)
    fill(other, 5.0)
    state.left = other
    assert state.left is other
    fill(other, 6.0)
    state.restore()
    assert weights(other) == [5.0] and weights(left) == [0.0]


def test_the_registry_decides_by_its_order() -> None:
    default = get_handler_registry()
    assert default == [
        (nn.Module, ModelStateHandler),
        (torch.optim.Optimizer, OptimizerStateHandler),
        (ElasticSampler, SamplerStateHandler),
    ]

    calls: list[str] = []

    class Counted(StateHandler):
        def save(self) -> None:
            calls.append("save")

        def restore(self) -> None:
            calls.append("restore")

        def sync(self) -> None:
            calls.append("sync")

    def main(rank: int) -> None:
        state = TorchState(nn.Linear(1, 1), text="a")
        state.save()
        state.restore()
        state.sync()
        state.model = nn.Linear(1, 1)

    set_handler_registry([(nn.Linear, Counted), *default])
    try:
        run_ranks(1, main)
    finally:
        set_handler_registry(default)
    assert calls == ["save", "restore", "sync", "save", "save"]


@on_ranks(2)
def test_schedulers_and_scalers_are_changed_in_place(rank: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * (rank + 1))
    state = TorchState(model, optimizer, schedule=schedule, scaler=scaler)
    state.sync()
    assert state.scaler is scaler and scaler.get_scale() == 4.0
    step(model, optimizer)
    schedule.step()
    state.commit()
    for _ in range(2):
        step(model, optimizer)
        schedule.step()
    scaler.scale(torch.ones(1))
    scaler.update(64.0)
    state.restore()
    rate = optimizer.param_groups[0]["lr"]
    assert (rate, schedule.last_epoch, scaler.get_scale()) == (0.05, 1, 4.0)
    step(model, optimizer)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.025


@on_ranks(1)
def test_a_scaler_unscales_again_after_a_failed_step(rank: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = TorchState(model, optimizer, scaler=scaler)
    for failed in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        scaler.unscale_(optimizer)
        if failed:
            state.restore()
    scaler.step(optimizer)
    scaler.update()


@on_ranks(2)
def test_buffers_of_sync_batch_norm_are_state(rank: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), hvd.SyncBatchNorm(3))
    state = TorchState(model)
    state.sync()
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)))
    state.commit()
    saved = model[1].running_mean.clone()
    model(torch.full((4, 3), 100.0))
    state.restore()
    assert torch.equal(model[1].running_mean, saved)
    assert int(model[1].num_batches_tracked) == 1
    means = hvd.allgather(model[1].running_mean.reshape(1, -1))
    assert torch.equal(means[0], means[1])


@on_ranks(1)
def test_plain_tensors_are_copied(rank: int) -> None:
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    state = TorchState(best=torch.zeros(2), history={"loss": []}, loss=None)
    state.best += 5
    state.history["loss"].append(1)
    state.restore()
    assert state.best.tolist() == [0, 0] and state.history == {"loss": []}
    state.loss = loss
    state.commit()  # a tensor with a graph
    state.loss = None
    state.restore()
    assert float(state.loss) == 6.0


@on_ranks(1)
def test_what_cannot_be_copied_is_named(rank: int) -> None:
    with pytest.raises(TypeError, match="attribute 'lines' is a generator"):
        TorchState(lines=(line for line in "abc"))
    with pytest.raises(ValueError, match=r"a state has a method save\(\)"):
        TorchState(save=3)
    with pytest.raises(ValueError, match="commit='never'"):
        TorchState(commit="never")


@on_ranks(2)
def test_lbfgs_and_sparse_parts_are_state_too(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    if rank == 0:
        optimizer.step(closure)
    model.register_buffer("sparse", torch.eye(3).to_sparse() * (rank + 1))
    state = TorchState(model, optimizer)
    state.sync()
    assert np.array_equal(model.sparse.to_dense().numpy(), np.eye(3))
    assert len(hvd.allgather_object(optimizer.state_dict()["state"])[1]) == 1
    state.restore()
    assert np.array_equal(model.sparse.to_dense().numpy(), np.eye(3))


def test_handlers_say_what_they_need() -> None:
    for method in ("save", "restore", "sync"):
        with pytest.raises(NotImplementedError):
            getattr(handlers.StateHandler(1), method)()


def divided(rank: int) -> tuple[Any, TorchState, Callable[[], None]]:
    """A model whose optimizer's state is divided, its state, and a step of it."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        plain, named_parameters=model.named_parameters(), shard_state=True
    )
    state = TorchState(model, optimizer, step=0)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.step += 1

    return model, state, step


def die(rank: int) -> None:
    running = find()
    assert running is not None
    running.engine.abandon(hvd.HorovodInternalError(f"rank {rank} died", rank=rank))


@on_ranks(3)
def test_a_save_that_loses_a_part_of_the_state_leaves_the_last_one(rank: int) -> None:
    """A rank dies between its step and its commit, and the parts of all are gathered there."""
    model, state, step = divided(rank)
    step()
    state.save()
    saved = model.weight.clone()
    step()
    if rank == 2:
        die(rank)
        return
    with pytest.raises(hvd.HorovodInternalError):
        state.save()
    state.restore()
    assert torch.equal(model.weight, saved) and state.step == 1


def test_a_loss_while_an_interrupt_saves_leads_to_the_next_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host that goes away has a part of the state."""

    class NextWorldError(BaseException):
        pass

    def reset(_held: Callable[[], int]) -> None:
        raise NextWorldError

    monkeypatch.setattr(worlds, "world_is_broken", lambda: False)

    def main(rank: int) -> None:
        _, state, step = divided(rank)

        def train() -> None:
            step()
            if rank == 2:
                die(rank)
                raise SystemExit
            state._interrupt(HostUpdateResult.removed)

        loop = elastic_run._Loop(state, reset, elastic_run.is_loss, own_reset=False)
        with pytest.raises(SystemExit if rank == 2 else NextWorldError):
            loop.run(train)

    run_ranks(3, main)


def test_a_sync_that_loses_its_root_amid_models_leaves_the_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever was given first: only weights that have changed tell of it, by their versions."""
    real = handlers.broadcast_flat

    def lost(tensors: Any, name: str, source: Any) -> Any:
        if name == "elastic.model":
            raise hvd.HorovodInternalError("rank 0 is gone", rank=0)
        return real(tensors, name, source)

    monkeypatch.setattr(handlers, "broadcast_flat", lost)

    def main(rank: int) -> None:
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = TorchState(optimizer=optimizer, network=model, commit="step", step=0)
        for _ in range(1 if rank else 2):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            state.save()
        with pytest.raises(hvd.HorovodInternalError):
            state.sync()
        state.restore()
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        assert (momentum == (1.0 if rank else 1.9)).all()

    run_ranks(2, main)
