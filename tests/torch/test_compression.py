"""Compressors with error feedback do what their models do, on all ranks, step after step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.gradients.compressed_bucket import FeedbackState
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.common.tensors.compression import FeedbackCompressor, Int8, OneBit, PowerSGD, TopK
from tests.compressors import (
    COMPRESSORS,
    BlockModel,
    Model,
    PowerSGDModel,
    SignModel,
    TopKModel,
    WholeModel,
    every_compressor,
)
from tests.ranks import run_ranks
from tests.torch.on_ranks import on_ranks

SIZE = 3
SHAPES = {"weight": (24, 40), "conv": (16, 5, 3, 3), "bias": (37,), "scalar": ()}


def gradient(name: str, rank: int, step: int) -> Any:
    seed = [*name.encode(), rank, step]
    return np.random.default_rng(seed).standard_normal(SHAPES[name]).astype(np.float32)


def parameters() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}


def distributed(named: dict[str, Any], compressor: Any, **options: Any) -> Any:
    optimizer = torch.optim.SGD(named.values(), lr=1.0)
    return hvd.DistributedOptimizer(optimizer, named.items(), compression=compressor, **options)


def run_backward(named: dict[str, Any], rank: int, step: int) -> None:
    terms = [
        (parameter * torch.from_numpy(np.asarray(gradient(name, rank, step)))).sum()
        for name, parameter in named.items()
    ]
    torch.stack(terms).sum().backward()


def train(optimizer: Any, named: dict[str, Any], rank: int, steps: range) -> list[dict[str, Any]]:
    """Return the reduced gradients of each step."""
    reduced = []
    for step in steps:
        optimizer.zero_grad()
        run_backward(named, rank, step)
        optimizer.step()
        reduced.append({name: each.grad.numpy().copy() for name, each in named.items()})
    return reduced


def model_of(compressor: FeedbackCompressor, name: str, ranks: int) -> Model:
    shape = SHAPES[name]
    if isinstance(compressor, TopK):
        return TopKModel(ranks, shape, compressor.ratio, compressor.warmup_steps)
    if isinstance(compressor, OneBit):
        return SignModel(ranks, shape, compressor.block, compressor.warmup_steps)
    if isinstance(compressor, Int8):
        return BlockModel(ranks, shape, compressor.block)
    assert isinstance(compressor, PowerSGD)
    if len(shape) < 2:
        return WholeModel(ranks, shape)
    columns = int(np.prod(shape[1:]))
    state = FeedbackState(compressor, global_process_set)
    factor = state.factor(name, (columns, compressor.rank))
    return PowerSGDModel(ranks, shape, factor, compressor.warmup_steps)


def expected(compressor: FeedbackCompressor, ranks: int, steps: int) -> list[dict[str, Any]]:
    models = {name: model_of(compressor, name, ranks) for name in SHAPES}
    return [
        {
            name: model.step([gradient(name, rank, step) for rank in range(ranks)]) / ranks
            for name, model in models.items()
        }
        for step in range(steps)
    ]


def check_close(reduced: list[dict[str, Any]], models: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(reduced, models, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(ours[name], theirs[name], atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "compressor", [*COMPRESSORS, hvd.Compression.powersgd(2, warmup_steps=2)], ids=str
)
def test_every_step_is_that_of_the_model(compressor: FeedbackCompressor) -> None:
    def main(rank: int) -> Any:
        named = parameters()
        alone = [[parameter] for parameter in named.values()]
        return train(distributed(named, compressor, groups=alone), named, rank, range(4))

    models = expected(compressor, SIZE, 4)
    for reduced in run_ranks(SIZE, main):
        check_close(reduced, models)


def left(optimizer: Any, name: str) -> Any:
    """Return what this rank has not sent of a gradient."""
    residual = optimizer._exchange.feedback.state.residuals.get(name)
    size = int(np.prod(SHAPES[name]))
    return 0 if residual is None else residual.reshape(-1)[:size].reshape(SHAPES[name])


@every_compressor
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"segmentation": "count:3"}], ids=str)
def test_what_is_sent_and_what_is_left_are_all_gradients(
    compressor: FeedbackCompressor, options: dict[str, Any]
) -> None:
    steps = 5

    def main(rank: int) -> Any:
        named = parameters()
        optimizer = distributed(named, compressor, op=hvd.Sum, **options)
        train(optimizer, named, rank, range(steps))
        return {
            name: (-each.detach().numpy(), left(optimizer, name)) for name, each in named.items()
        }

    results = run_ranks(SIZE, main)
    for name in SHAPES:
        for result in results[1:]:
            np.testing.assert_array_equal(result[name][0], results[0][name][0])
        whole = sum(gradient(name, rank, step) for rank in range(SIZE) for step in range(steps))
        remaining = sum(result[name][1] for result in results)
        np.testing.assert_allclose(results[0][name][0] + remaining, whole, atol=2e-4, err_msg=name)


@every_compressor
@on_ranks(2)
def test_buckets_are_sent_while_backward_runs(rank: int, compressor: FeedbackCompressor) -> None:
    named = parameters()
    optimizer = distributed(named, compressor, segmentation="index:0,1,2,3")
    train(optimizer, named, rank, range(1))  # In the first step ranks have to agree.
    optimizer.zero_grad()
    run_backward(named, rank, 1)
    assert len(optimizer._exchange._in_flight) == len(SHAPES)
    optimizer.step()


@every_compressor
def test_several_passes_and_a_process_set(compressor: FeedbackCompressor) -> None:
    passes = 2

    def main(rank: int) -> Any:
        pair = hvd.add_process_set([0, 2])
        named = parameters()
        optimizer = distributed(
            named,
            compressor,
            process_set=pair,
            backward_passes_per_step=passes,
            groups=[[parameter] for parameter in named.values()],
            gradient_predivide_factor=4.0,
        )
        for step in range(passes):
            run_backward(named, rank, step)
        optimizer.step()
        return {name: each.grad.numpy().copy() for name, each in named.items()}

    results = run_ranks(SIZE, main)
    for name in SHAPES:
        sums = {rank: gradient(name, rank, 0) + gradient(name, rank, 1) for rank in range(SIZE)}
        reduced = model_of(compressor, name, 2).step([sums[0], sums[2]]) / 2
        for rank in (0, 2):
            np.testing.assert_allclose(results[rank][name], reduced, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(results[1][name], sums[1], atol=1e-6)


@every_compressor
def test_training_goes_on_from_a_state_dict(compressor: FeedbackCompressor, tmp_path: Any) -> None:
    def main(rank: int) -> Any:
        named = parameters()
        optimizer = distributed(named, compressor)
        train(optimizer, named, rank, range(2))
        torch.save(optimizer.state_dict(), tmp_path / f"{rank}.pt")
        uninterrupted = train(optimizer, named, rank, range(2, 4))
        named = parameters()
        optimizer = distributed(named, compressor)
        optimizer.load_state_dict(torch.load(tmp_path / f"{rank}.pt", weights_only=True))
        resumed = train(optimizer, named, rank, range(2, 4))
        for name in SHAPES:
            np.testing.assert_array_equal(resumed[1][name], uninterrupted[1][name], err_msg=name)

    run_ranks(SIZE, main)


def test_a_rank_that_has_nothing_unsent_can_save(tmp_path: Path) -> None:
    """As one that has come to an elastic job, until its first step."""
    pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")
    left_out, *kept = SHAPES

    def main(rank: int) -> Any:
        named = parameters()
        optimizer = distributed(named, Int8())
        state = optimizer._exchange.feedback.state
        train(optimizer, named, rank, range(2))
        if rank == 1:
            saved = state.save()
            saved["residuals"] = {key: saved["residuals"][key] for key in kept}
            state.load(saved)
        hvd.checkpoint.save(tmp_path / "it", {"optimizer": optimizer})
        before = state.save()["residuals"]
        hvd.checkpoint.load(tmp_path / "it", {"optimizer": optimizer})
        return before, state.save()["residuals"]

    for before, after in run_ranks(2, main):
        assert left_out not in after
        for key in kept:
            np.testing.assert_array_equal(before[key], after[key])


@every_compressor
@pytest.mark.parametrize("size", [SIZE, 2])
def test_training_goes_on_from_a_checkpoint(
    compressor: FeedbackCompressor, size: int, tmp_path: Path
) -> None:
    """By as many ranks exactly; others get what all ranks share, and have sent all."""
    pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

    def save(rank: int) -> Any:
        named = parameters()
        optimizer = distributed(named, compressor)
        hvd.checkpoint.save(tmp_path / "early", {"optimizer": optimizer})
        train(optimizer, named, rank, range(2))
        hvd.checkpoint.save(tmp_path / "it", {"optimizer": optimizer})
        saved = optimizer._exchange.feedback.state.save()
        return saved, train(optimizer, named, rank, range(2, 4))

    def load(rank: int) -> Any:
        named = parameters()
        optimizer = distributed(named, compressor)
        state = optimizer._exchange.feedback.state
        hvd.checkpoint.load(tmp_path / "early", {"optimizer": optimizer})
        assert not state.steps
        hvd.checkpoint.load(tmp_path / "it", {"optimizer": optimizer})
        return state.save(), train(optimizer, named, rank, range(2, 4))

    before = run_ranks(SIZE, save)
    for (saved, uninterrupted), (loaded, resumed) in zip(
        before[:size], run_ranks(size, load), strict=True
    ):
        assert loaded["steps"] == saved["steps"] != {}
        assert loaded["factors"].keys() == saved["factors"].keys()
        if size != SIZE:
            assert not loaded["residuals"]
            continue
        for name in SHAPES:
            np.testing.assert_array_equal(resumed[1][name], uninterrupted[1][name], err_msg=name)


@every_compressor
@on_ranks(2)
def test_a_state_of_another_rank_brings_no_residual(
    rank: int, compressor: FeedbackCompressor
) -> None:
    named = parameters()
    optimizer = distributed(named, compressor)
    train(optimizer, named, rank, range(2))
    own = np.copy(left(optimizer, "weight"))
    state = hvd.broadcast_object(optimizer.state_dict(), 0)
    optimizer.load_state_dict(state)
    hvd.broadcast_optimizer_state(optimizer, 0)
    np.testing.assert_array_equal(left(optimizer, "weight"), own)
    new = distributed(parameters(), compressor)
    new.load_state_dict(state)
    np.testing.assert_array_equal(left(new, "weight"), own if rank == 0 else 0)
    steps = new._exchange.feedback.state.steps
    assert steps == dict.fromkeys(SHAPES, 2)


@every_compressor
def test_a_rank_that_comes_and_one_that_goes(compressor: FeedbackCompressor) -> None:
    """As in an elastic job: the optimizers of those who stay live on in the next world."""
    optimizers: dict[int, Any] = {}

    def work(number: int, rank: int, steps: range) -> Any:
        if number not in optimizers:
            named = parameters()
            optimizers[number] = distributed(named, compressor), named
        optimizer, named = optimizers[number]
        train(optimizer, named, rank, steps)
        state = optimizer._exchange.feedback.state
        return dict(state.steps), {name: np.copy(each) for name, each in state.factors.items()}

    run_ranks(3, lambda rank: work(rank, rank, range(2)))
    before = np.copy(left(optimizers[2][0], "weight"))
    del optimizers[1]
    workers = [7, 2]  # The newcomer is rank 0.

    def main(rank: int) -> Any:
        if rank == 1:
            np.testing.assert_array_equal(left(optimizers[2][0], "weight"), before)
        return work(workers[rank], rank, range(2, 4))

    results = run_ranks(2, main)
    assert [steps for steps, _ in results] == [dict.fromkeys(SHAPES, 4)] * 2
    assert results[0][1].keys() == results[1][1].keys()
    for name, factor in results[0][1].items():
        np.testing.assert_array_equal(factor, results[1][1][name])


@pytest.mark.parametrize("other", [hvd.Compression.none, COMPRESSORS[0]])
@on_ranks(2)
def test_ranks_with_different_compressors_are_told_so(rank: int, other: Any) -> None:
    named = parameters()
    optimizer = distributed(named, other if rank else hvd.Compression.powersgd(3))
    label = "NoneCompressor" if other is hvd.Compression.none else "int8"
    with pytest.raises(HorovodInternalError, match=rf"(?s)powersgd\(rank=3\).*{label}"):
        train(optimizer, named, rank, range(1))


@every_compressor
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@on_ranks(2)
def test_gradients_that_are_not_finite_are_seen_by_all_and_forgotten(
    rank: int, compressor: FeedbackCompressor, bad: float
) -> None:
    named = parameters()
    optimizer = distributed(named, compressor)
    train(optimizer, named, rank, range(1))
    optimizer.zero_grad()
    loss = sum((parameter * float(bad if rank == 1 else 1)).sum() for parameter in named.values())
    loss.backward()
    optimizer.synchronize()
    for parameter in named.values():
        assert not parameter.grad.isfinite().any() or parameter.dim() == 1
    for name in SHAPES:
        assert not np.any(left(optimizer, name))
    optimizer.zero_grad()
    for parameter in named.values():
        parameter.data.zero_()
    for reduced in train(optimizer, named, rank, range(2, 4)):
        assert all(np.isfinite(each).all() for each in reduced.values())


@on_ranks(2)
def test_other_dtypes_layouts_and_sparse_gradients(rank: int) -> None:
    named = {
        "half": torch.nn.Parameter(torch.zeros(16, 24, dtype=torch.bfloat16)),
        "double": torch.nn.Parameter(torch.zeros(16, 24, dtype=torch.float64)),
        "last": torch.nn.Parameter(torch.zeros(8, 6, 4, 4).to(memory_format=torch.channels_last)),
    }
    embedding = torch.nn.Embedding(10, 8, sparse=True)
    named["rows"] = embedding.weight
    optimizer = distributed(named, hvd.Compression.int8())
    for _ in range(2):
        optimizer.zero_grad()
        loss = embedding(torch.tensor([rank])).sum() * 2
        for name in ("half", "double", "last"):
            loss = loss + (named[name] * (rank + 1)).sum()
        loss.backward()
        optimizer.step()
        for name in ("half", "double", "last"):
            torch.testing.assert_close(
                named[name].grad.float(), torch.full(named[name].shape, 1.5), rtol=0, atol=0.01
            )
        rows = named["rows"].grad
        assert rows.is_sparse
        assert rows.to_dense()[:2].unique().tolist() == [1.0]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_bad_parameters_are_refused_at_once(value: Any) -> None:
    with pytest.raises(ValueError, match="powersgd: rank must be a whole number from 1 on"):
        hvd.Compression.powersgd(value)
    with pytest.raises(ValueError, match="int8: block must be a whole number from 8 on"):
        hvd.Compression.int8(value)
    with pytest.raises(ValueError, match="onebit: block must be a whole number from 8 on"):
        hvd.Compression.onebit(block=value)
    if value != 0:
        with pytest.raises(ValueError, match="onebit: warmup_steps must be a whole number"):
            hvd.Compression.onebit(value)
        with pytest.raises(ValueError, match="powersgd: warmup_steps must be a whole number"):
            hvd.Compression.powersgd(2, value)
        with pytest.raises(ValueError, match="topk: warmup_steps must be a whole number"):
            hvd.Compression.topk(0.5, value)
    with pytest.raises(ValueError, match="topk: ratio must be greater than 0 and at most 1"):
        hvd.Compression.topk(value)


def test_blocks_are_whole_bytes() -> None:
    with pytest.raises(ValueError, match="multiple of 8, not 12"):
        hvd.Compression.int8(12)


def test_there_is_no_feedback_without_an_optimizer() -> None:
    compressor: Any = hvd.Compression.powersgd(2)

    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"powersgd\(rank=2\) remembers"):
            hvd.allreduce(torch.ones(2, 2), compression=compressor)
        with pytest.raises(ValueError, match="op must be Average or Sum, not Adasum"):
            distributed(parameters(), compressor, op=hvd.Adasum)
        with pytest.raises(ValueError, match="shard_state"):
            distributed(parameters(), compressor, shard_state=True)

    run_ranks(2, main)


@pytest.mark.parametrize("compressor", [COMPRESSORS[1], COMPRESSORS[2]], ids=str)
def test_a_rank_may_join_others_that_go_on(compressor: FeedbackCompressor) -> None:

    def main(rank: int) -> Any:
        named = parameters()
        optimizer = distributed(named, compressor)
        reduced = train(optimizer, named, rank, range(2 if rank == 1 else 4))
        hvd.join()
        return [*reduced, *train(optimizer, named, rank, range(4, 5))]

    first, second = run_ranks(2, main)
    assert len(first) == 5
    for name in SHAPES:
        np.testing.assert_array_equal(first[-1][name], second[-1][name])
        assert np.isfinite(first[-1][name]).all()


@pytest.mark.parametrize("names", [list(SHAPES), ["bias"]], ids=["", "a block for one rank"])
@on_ranks(SIZE)
def test_int8_says_that_a_rank_has_joined(rank: int, names: list[str]) -> None:
    """No world is lost by it, so that an elastic job does not try again and again."""
    every = parameters()
    named = {name: every[name] for name in names}
    optimizer = distributed(named, hvd.Compression.int8())
    train(optimizer, named, rank, range(1))
    if rank != 1:
        with pytest.raises(HorovodInternalError, match="a rank has joined") as caught:
            train(optimizer, named, rank, range(1, 2))
        assert caught.value.job_goes_on
    hvd.join()


def test_powersgd_finds_what_comes_after_a_step_of_zeros() -> None:
    """The first rows stay zero, as those of an embedding that nobody looks up."""

    def main(rank: int) -> Any:
        weight = torch.nn.Parameter(torch.zeros(32, 20))
        optimizer = distributed({"weight": weight}, hvd.Compression.powersgd(2))
        for step in range(40):
            weight.grad = torch.zeros(32, 20)
            if step:
                weight.grad[8:] = 1.0
            optimizer.step()
        return weight.detach().numpy()

    for found in run_ranks(2, main):
        np.testing.assert_allclose(found[8:], -39.0, rtol=0.1)
        np.testing.assert_allclose(found[:8], 0.0, atol=1e-6)


@on_ranks(2)
def test_powersgd_goes_on_after_an_overflow(rank: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(32, 20))
    optimizer = distributed({"weight": weight}, hvd.Compression.powersgd(2))
    for value in (3e38, 1.0, 1.0):
        weight.grad = torch.full((32, 20), value)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert weight.grad is not None and torch.isfinite(weight.grad).all()


@every_compressor
@on_ranks(2)
def test_a_tensor_without_elements(rank: int, compressor: FeedbackCompressor) -> None:
    empty = torch.nn.Parameter(torch.zeros(0, 3))
    optimizer = distributed({"empty": empty}, compressor)
    for _ in range(3):
        empty.grad = torch.zeros(0, 3)
        optimizer.step()


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"give one, such as Compression.powersgd\(4\)"):
        distributed({"weight": weight}, hvd.Compression.powersgd)
    optimizer = distributed({"weight": weight}, hvd.Compression.int8())
    weight.grad = torch.ones(4, dtype=torch.complex64)
    with pytest.raises(ValueError, match="no complex gradients"):
        optimizer.step()
