"""The state of a sharded optimizer goes on elsewhere: on fewer ranks, whole, after a failure."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from tests.ranks import run_ranks
from tests.torch.sharded_training import (
    OPTIMIZERS,
    STEPS,
    backward,
    batches,
    both,
    network,
    same,
    states_equal,
    train,
    weights,
)


def test_the_consolidated_state_is_that_of_the_plain_optimizer() -> None:
    saved: dict[bool, Any] = {}

    def body(rank: int, model: nn.Module, optimizer: Any) -> None:
        train(rank, model, optimizer)
        sharded = hasattr(optimizer, "consolidate")
        state = optimizer.consolidate() if sharded else optimizer.state_dict()
        if rank == 0:
            saved[sharded] = copy.deepcopy(state)

    both(3, OPTIMIZERS["adam"], body)
    assert states_equal(saved[True]["state"], saved[False]["state"])
    assert saved[True]["param_groups"] == saved[False]["param_groups"]
    model = network()
    alone = OPTIMIZERS["adam"](model.parameters())
    alone.load_state_dict(saved[True])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(("adam", sizes) for sizes in [(4, 2), (2, 3), (3, 1), (1, 2)]),
        *((name, (2, 3)) for name in ("counts in state", "nadam", "asgd")),
    ],
    ids=str,
)
def test_training_goes_on_with_another_number_of_ranks(name: str, sizes: tuple[int, int]) -> None:
    """The oracle loads the state into optimizers without shards."""
    results = []
    for sharded in (False, True):
        models = [network() for _ in range(4)]
        saved: list[Any] = []

        def main(
            rank: int, sharded: bool = sharded, models: Any = models, saved: Any = saved
        ) -> Any:
            model = models[rank]
            optimizer = hvd.DistributedOptimizer(
                OPTIMIZERS[name](model.parameters()), shard_state=sharded
            )
            if saved:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(copy.deepcopy(saved[1]))
            for batch in batches(0):  # The same on all ranks: independent of their number.
                optimizer.zero_grad()
                backward(model, batch)
                optimizer.step()
            state = optimizer.consolidate() if sharded else optimizer.state_dict()
            return copy.deepcopy(model.state_dict()), copy.deepcopy(state)

        saved.extend(run_ranks(sizes[0], main)[0])
        results.append(run_ranks(sizes[1], main)[0])
    for one, other in zip(*results, strict=True):
        assert one.keys() == other.keys()
    for key, value in results[0][0].items():
        torch.testing.assert_close(results[1][0][key], value, rtol=0, atol=0)
    assert states_equal(results[0][1]["state"], results[1][1]["state"])


def test_what_belongs_to_no_parameter_is_saved_and_survives_other_shards() -> None:
    models = [network() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        first = next(iter(model.parameters()))
        twins: list[Any] = [
            hvd.DistributedOptimizer(
                OPTIMIZERS["counts in state"](model.parameters()), shard_state=True
            )
            for _ in range(2)
        ]
        train(rank, model, twins[0])
        twins[1].load_state_dict(copy.deepcopy(twins[0].state_dict()))
        for optimizer in twins:
            assert optimizer.state["steps"] == STEPS
            first.requires_grad_(not first.requires_grad)
            train(rank, model, optimizer)
            assert optimizer.state["steps"] == 2 * STEPS

    run_ranks(2, main)


def test_sharded_state_dicts() -> None:
    models = [network() for _ in range(3)]

    def optimizer_of(model: nn.Module, process_set: Any = None) -> Any:
        options = {} if process_set is None else {"process_set": process_set}
        return hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](model.parameters()), model.named_parameters(), shard_state=True,
            **options,
        )  # fmt: skip

    def main(rank: int) -> Any:
        model = models[rank]
        optimizer = optimizer_of(model)
        train(rank, model, optimizer)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert state["shards"]["layout"] == [[2], [0]] and state["shards"]["position"] == rank
        twin = copy.deepcopy(model)
        again = optimizer_of(twin)
        again.load_state_dict(state)
        train(rank, model, optimizer)
        train(rank, twin, again)
        assert same(weights(model), weights(twin))
        other = {**state, "shards": {**state["shards"], "position": 1 - rank}}
        with pytest.raises(ValueError, match="shards of another rank of the set: "):
            again.load_state_dict(other)
        with pytest.raises(ValueError, match="groups have"):
            again.load_state_dict({**state, "param_groups": [{"params": [0]}]})
        return state

    states = run_ranks(2, main)

    def three(rank: int) -> None:
        with pytest.raises(ValueError, match=r"\[\[2\], \[0\]\] there, \[\[3\], \[0\]\] here"):
            optimizer_of(models[rank]).load_state_dict(states[0])

    run_ranks(3, three)

    def alone(rank: int) -> None:
        with pytest.raises(ValueError, match="a shard of one of 2 ranks, and this rank is alone"):
            optimizer_of(models[rank]).load_state_dict(states[0])

    run_ranks(1, alone)


@pytest.mark.parametrize("freezes", [True, False])
def test_shards_that_are_loaded_when_others_are_trained(freezes: bool) -> None:
    """What is frozen since the save stays as it is, and what is thawed is trained."""

    def main(rank: int, sharded: bool) -> Any:
        model = models[sharded][rank]
        first = next(iter(model.parameters()))

        def optimizer_of() -> Any:
            made = OPTIMIZERS["adam"](model.parameters())
            return hvd.DistributedOptimizer(made, model.named_parameters(), shard_state=sharded)

        first.requires_grad_(freezes)
        optimizer = optimizer_of()
        train(rank, model, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        first.requires_grad_(not freezes)
        before = first.detach().clone()
        optimizer = optimizer_of()
        optimizer.load_state_dict(state)
        train(rank, model, optimizer)
        assert same(first, before) == freezes
        first.requires_grad_(freezes)
        train(rank, model, optimizer)
        return weights(model)

    models = [[network() for _ in range(2)] for _ in range(2)]
    plain, found = (run_ranks(2, partial(main, sharded=sharded)) for sharded in (False, True))
    assert all(same(plain[0], each) for each in found)


def test_one_rank_alone_asks_for_its_state_after_others_were_frozen() -> None:
    """The state dict has the shards of the last step, which another optimizer goes on with."""

    def body(rank: int, model: nn.Module, optimizer: Any) -> None:
        train(rank, model, optimizer)
        optimizer.zero_grad()
        next(iter(model.parameters())).requires_grad_(False)
        if rank == 0:
            optimizer.state_dict()
        hvd.barrier()
        state = copy.deepcopy(optimizer.state_dict())
        train(rank, model, optimizer)
        optimizer.load_state_dict(state)
        train(rank, model, optimizer)

    both(2, OPTIMIZERS["adam"], body)


def test_elastic_states_keep_all_of_it_for_any_number_of_ranks() -> None:
    """A commit of 3 ranks is restored by 2 of them, and by a newcomer that has no state."""
    models = [network() for _ in range(3)]
    states: list[Any] = [None] * 3

    def make(rank: int, number: int) -> Any:
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](models[number].parameters()), shard_state=True
        )
        return hvd.elastic.TorchState(model=models[number], optimizer=optimizer)

    def three(rank: int) -> Any:
        state = states[rank] = make(rank, rank)
        train(0, models[rank], state.optimizer)
        state.save()
        whole = state.optimizer.consolidate()
        train(0, models[rank], state.optimizer)  # Lost by the failure.
        return copy.deepcopy(whole)

    whole = run_ranks(3, three)[0]

    def two(rank: int) -> Any:
        # Rank 0 was there before, rank 1 is new.
        state = states[0] if rank == 0 else make(rank, 1)
        if rank == 0:
            state.restore()
        state.sync()
        found = copy.deepcopy(state.optimizer.consolidate())
        train(0, models[rank], state.optimizer)
        assert sum(s["exp_avg"].numel() for s in state.optimizer.state.values()) > 0
        return found, weights(models[rank])

    (first, weights_0), (second, weights_1) = run_ranks(2, two)
    assert states_equal(first["state"], whole["state"])
    assert states_equal(second["state"], whole["state"])
    assert same(weights_0, weights_1)


@pytest.mark.parametrize("shard_state", [False, True])
@pytest.mark.parametrize("form", ["state_dict", "consolidate"])
def test_the_hooks_of_state_dicts_are_called(shard_state: bool, form: str) -> None:
    def main(rank: int) -> None:
        model, calls = network(), []
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](model.parameters()), shard_state=shard_state
        )

        def after_saving(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            calls.append("saved")
            return {**state_dict, "note": 7}

        def before_loading(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            calls.append(f"loads {state_dict.pop('note')}")
            groups = [{**group, "lr": 0.5} for group in state_dict["param_groups"]]
            return {**state_dict, "param_groups": groups}

        optimizer.register_state_dict_pre_hook(lambda _: calls.append("saves"))
        optimizer.register_state_dict_post_hook(after_saving)
        optimizer.register_load_state_dict_pre_hook(before_loading)
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
        train(rank, model, optimizer)
        saved = getattr(optimizer, form if shard_state else "state_dict")()
        optimizer.load_state_dict(saved)
        assert calls == ["saves", "saved", "loads 7", "loaded"]
        assert saved["note"] == 7
        assert {group["lr"] for group in optimizer.param_groups} == {0.5}
        train(rank, model, optimizer)

    run_ranks(2, main)


def test_commits_by_step_are_refused() -> None:
    def main(rank: int) -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](model.parameters()), shard_state=True
        )
        with pytest.raises(ValueError, match="shard_state=True: use commit"):
            hvd.elastic.TorchState(model=model, optimizer=optimizer, commit="step")

    run_ranks(2, main)


def test_state_that_one_rank_has_loaded_is_broadcast() -> None:
    whole: list[Any] = []

    def main(rank: int) -> Any:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](model.parameters()), shard_state=True
        )
        if not whole:
            train(0, model, optimizer)
            return optimizer.consolidate()
        if rank == 0:
            optimizer.load_state_dict(whole[0])
            optimizer.param_groups[0]["lr"] = 0.5
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.5
        return optimizer.consolidate()

    whole.append(run_ranks(2, main)[0])
    for state in run_ranks(2, main):
        assert states_equal(state["state"], whole[0]["state"])
