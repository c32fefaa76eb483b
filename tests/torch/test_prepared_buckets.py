"""What a step prepares for the next one is used again only while it is still right."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.api.tensor_entries import PlacedEntry
from hvdlite.torch import mpi_ops
from hvdlite.torch.compression import Compression
from tests.short_calls import until
from tests.torch.on_ranks import on_ranks
from tests.torch.prepared_gradients import Gradients, Tensor, buckets, gradient_options, values

pytestmark = pytest.mark.timeout(120)


@on_ranks(2)
def test_steady_steps_use_the_same_entries(rank: int) -> None:
    gradients = Gradients((3, 4), (5,))
    used = []
    for step in range(4):
        gradients.set(step)
        gradients.step(step)
        (bucket,) = buckets()
        used.append([*bucket._entries])
        gradients.optimizer.zero_grad()
    assert all(type(entry) is PlacedEntry for entry in used[0])
    assert all(a is b for row in used for a, b in zip(used[0], row, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda each: each.clone(), id="other memory"),
        pytest.param(lambda each: each.t().contiguous().t(), id="other strides"),
        pytest.param(lambda each: torch.stack([each, -each])[0], id="a view"),
        pytest.param(lambda each: torch.complex(each, -each).conj().imag, id="lazily negated"),
        pytest.param(lambda each: each.as_subclass(Marked), id="a subclass"),
    ],
)
@on_ranks(2)
def test_gradients_that_lie_elsewhere_in_each_step(
    rank: int, change: Callable[[Tensor], Tensor]
) -> None:
    """Steps alternate between plain gradients and changed ones, with the same names."""
    gradients = Gradients((3, 4), (4, 3))
    for step in range(5):
        gradients.set(step, change if step % 2 else lambda each: each)
        gradients.step(step)


class Marked(Tensor):
    """A tensor of another class, as frameworks derive them."""


@on_ranks(2)
def test_memory_that_is_exchanged_behind_a_tensor(rank: int) -> None:
    """The tensor stays the same object, and its memory does not."""
    tensor = torch.empty(3)
    for step, count in enumerate((3, 3, 7, 3)):
        tensor.set_(torch.full((count,), float(step + rank)))  # type: ignore[call-overload]
        expected = torch.full((count,), 2.0 * step + 1)
        assert hvd.allreduce_(tensor, name="t", op=hvd.Sum).equal(expected)
        names = [f"b{index}" for index in range(2)]
        other = torch.full((2,), float(rank))
        tensor.fill_(rank)
        options = gradient_options()
        mpi_ops.runner.start_bucket(names, [tensor, other], options).wait()
        assert tensor.equal(torch.ones(count)) and other.equal(torch.ones(2))


@on_ranks(2)
def test_a_dtype_that_changes_under_a_name(rank: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.int32, torch.bfloat16, torch.float32):
        tensors = [torch.full((4,), index + rank, dtype=dtype) for index in range(3)]
        bucket = mpi_ops.runner.start_bucket(["a", "b", "c"], tensors, gradient_options())
        bucket.wait()
        for index, tensor in enumerate(tensors):
            assert tensor.equal(torch.full((4,), 2 * index + 1, dtype=dtype))


@on_ranks(2)
def test_options_that_change_under_a_name(rank: int) -> None:
    for factor in (1.0, 3.0, 1.0):
        tensors = [torch.ones(2), torch.ones(3)]
        options = gradient_options(postscale_factor=factor)
        mpi_ops.runner.start_bucket(["a", "b"], tensors, options).wait()
        assert all(tensor.eq(2 * factor).all() for tensor in tensors)


@on_ranks(2)
def test_a_result_that_was_not_taken_survives_the_next_call_of_its_name(rank: int) -> None:
    first, second = torch.ones(3), torch.full((3,), 2.0)
    handle = hvd.allreduce_async_(first, name="t", op=hvd.Sum)
    until(lambda: hvd.poll(handle))
    other = hvd.allreduce_async_(second, name="t", op=hvd.Sum)
    assert hvd.synchronize(handle) is first and hvd.synchronize(other) is second
    assert first.eq(2).all() and second.eq(4).all()

    tensors = [torch.ones(2), torch.ones(2)]
    bucket = mpi_ops.runner.start_bucket(["a", "b"], tensors, gradient_options())
    until(bucket.handle.poll)
    again = [torch.ones(2), torch.ones(2)]
    late = mpi_ops.runner.start_bucket(["a", "b"], again, gradient_options())
    assert late is not bucket
    for each in (bucket, late):
        each.wait()
    assert all(tensor.eq(2).all() for tensor in [*tensors, *again])


@on_ranks(2)
def test_a_step_keeps_no_gradient_alive(rank: int) -> None:
    """The memory of a gradient that the user has dropped is free for the next backward."""
    gradients = Gradients((8, 8), (8,))
    for step in range(2):
        gradients.set(step)
        gradients.step(step)
        alive = [weakref.ref(parameter.grad) for parameter in gradients.parameters]
        gradients.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        assert [reference() for reference in alive] == [None, None]


@on_ranks(2)
def test_parameters_that_come_and_freeze(rank: int) -> None:
    gradients = Gradients((3,), (4,))
    added = nn.Parameter(torch.zeros(2))
    for step in range(6):
        if step == 2:
            gradients.optimizer.add_param_group({"params": [added]})
            gradients.parameters.append(added)
        if step == 4:
            frozen = gradients.parameters.pop(1)
            frozen.requires_grad_(False)
            frozen.grad = None
        for index, parameter in enumerate(gradients.parameters):
            mine = values(rank, step, index, tuple(parameter.shape))
            (parameter * mine).sum().backward()
        gradients.step(step)
        gradients.optimizer.zero_grad()
    assert frozen.grad is None


@on_ranks(2)
def test_a_gradient_that_one_rank_lacks(rank: int) -> None:
    gradients = Gradients((3,), (4,))
    for step in range(4):
        gradients.set(step)
        lacks = step % 2 == 1
        if lacks and rank == 1:
            gradients.parameters[0].grad = None
        gradients.optimizer.synchronize()
        expected = values(0, step, 0, (3,))
        expected += torch.zeros(3) if lacks else values(1, step, 0, (3,))
        assert gradients.parameters[0].grad is not None
        assert gradients.parameters[0].grad.equal(expected / 2)
        with gradients.optimizer.skip_synchronize():
            gradients.optimizer.step()


@pytest.mark.parametrize("passes", [1, 3])
@on_ranks(2)
def test_passes_accumulate(rank: int, passes: int) -> None:
    gradients = Gradients((3,), (4,), backward_passes_per_step=passes)
    for step in range(3):
        for _ in range(passes):
            for index, parameter in enumerate(gradients.parameters):
                mine = values(rank, step, index, tuple(parameter.shape))
                (parameter * mine).sum().backward()
        gradients.optimizer.synchronize()
        for index, parameter in enumerate(gradients.parameters):
            shape = tuple(parameter.shape)
            mean = (values(0, step, index, shape) + values(1, step, index, shape)) / 2
            assert parameter.grad is not None and parameter.grad.equal(passes * mean)
        with gradients.optimizer.skip_synchronize():
            gradients.optimizer.step()
        gradients.optimizer.zero_grad()


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("groups", [None, 1])
@on_ranks(2)
def test_compressions_and_groups(rank: int, compression: Any, groups: int | None) -> None:
    gradients = Gradients((3,), (2, 2), compression=compression, groups=groups)
    for step in range(3):
        gradients.set(step)
        gradients.step(step, tolerance=0 if compression is Compression.none else 1e-2)


@on_ranks(2)
def test_two_optimizers_take_turns_with_the_same_names(rank: int) -> None:
    both = Gradients((3,), (4,)), Gradients((3,), (4,))
    other_shapes = Gradients((5,), (2, 2))
    for step in range(6):
        for gradients in (*both, other_shapes):
            gradients.set(step)
            gradients.step(step)


@on_ranks(3)
def test_process_sets_with_the_same_names(rank: int) -> None:
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])]
    for step in range(3):
        for number, pair in enumerate(pairs):
            if pair.included():
                tensors = [torch.full((2,), 1.0 + rank), torch.full((3,), 1.0 + rank)]
                options = gradient_options(process_set=pair)
                mpi_ops.runner.start_bucket(["a", "b"], tensors, options).wait()
                assert all(each.eq((3.0, 5.0)[number]).all() for each in tensors), step
    hvd.remove_process_set(pairs[0])
    pairs[0] = hvd.add_process_set([0, 2])  # It gets the id of the one that was removed.
    if pairs[0].included():
        tensors = [torch.full((2,), 1.0 + rank), torch.full((3,), 1.0 + rank)]
        options = gradient_options(process_set=pairs[0])
        mpi_ops.runner.start_bucket(["a", "b"], tensors, options).wait()
        assert all(each.eq(4.0).all() for each in tensors)
