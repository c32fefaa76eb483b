"""Buckets that are prepared once: what ranks disagree on, refuse, or change meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.torch import mpi_ops
from tests.ranks import run_ranks
from tests.torch.on_ranks import on_ranks
from tests.torch.prepared_gradients import Gradients, gradient_options, values

pytestmark = pytest.mark.timeout(120)


@on_ranks(2)
def test_a_rank_joins_while_others_go_on(rank: int) -> None:
    gradients = Gradients((3,), (4,))
    for step in range(2 + 2 * rank):
        gradients.set(step)
        gradients.optimizer.synchronize()
        if step >= 2:
            for index, parameter in enumerate(gradients.parameters):
                expected = values(rank, step, index, tuple(parameter.shape)) / 2
                assert parameter.grad is not None and parameter.grad.equal(expected)
        with gradients.optimizer.skip_synchronize():
            gradients.optimizer.step()
    hvd.join()
    gradients.set(9)
    gradients.step(9)


@on_ranks(2)
def test_ranks_that_disagree_on_one_gradient(rank: int) -> None:
    """The error names it, and the other gradients of the call are reduced, now and later."""
    for step in range(3):
        wrong = step == 1
        shape = (3,) if not wrong or rank == 0 else (4,)
        tensors = [torch.ones(2), torch.ones(shape), torch.ones(5)]
        bucket = mpi_ops.runner.start_bucket(["a", "b", "c"], tensors, gradient_options())
        if wrong:
            with pytest.raises(HorovodInternalError, match=r"'allreduce\.b'.*\(3,\).*\(4,\)"):
                bucket.wait()
        else:
            bucket.wait()
            assert tensors[1].eq(2).all()
        assert tensors[0].eq(2).all() and tensors[2].eq(2).all()


def test_a_gradient_that_is_refused_keeps_no_other_back() -> None:
    """Rank 0 has used the name of one gradient for something else, which is pending."""

    refused = threading.Event()  # Rank 1 would otherwise answer what is pending on rank 0.

    def main(rank: int) -> None:
        gradients = Gradients((3,), (4,), (5,))
        for step in range(2):
            gradients.set(step)
            gradients.step(step)
        gradients.set(2)
        if rank == 0:
            exchange = gradients.optimizer._exchange
            wait = exchange._wait

            def tell_and_wait() -> Any:
                refused.set()
                return wait()

            exchange._wait = tell_and_wait
            held = hvd.allreduce_async(values(0, 2, 1, (4,)), name="p1")
            with pytest.raises(ValueError, match=r"'allreduce\.p1' on rank 0 has the same name"):
                gradients.optimizer.synchronize()
            hvd.synchronize(held)
            gradients.parameters.pop(1)
            expected = [0, 2]
        else:
            assert refused.wait(30)
            gradients.optimizer.synchronize()
            expected = [0, 1, 2]
        for index, parameter in zip(expected, gradients.parameters, strict=True):
            shape = tuple(parameter.shape)
            mean = (values(0, 2, index, shape) + values(1, 2, index, shape)) / 2
            assert parameter.grad is not None and parameter.grad.equal(mean)

    run_ranks(2, main)


@on_ranks(2)
def test_tensors_of_a_group_that_come_to_share_memory(rank: int) -> None:
    options = gradient_options(grouped=True)
    for _ in range(2):
        tensors = [torch.ones(2), torch.ones(2)]
        mpi_ops.runner.start_bucket(["a", "b"], tensors, options).wait()
    shared = torch.ones(2)
    with pytest.raises(ValueError, match="share memory"):
        mpi_ops.runner.start_bucket(["a", "b"], [shared, shared], options)
    mpi_ops.runner.start_bucket(["a", "b"], tensors, options).wait()
    assert all(tensor.eq(4).all() for tensor in tensors)


@on_ranks(2)
def test_a_state_with_another_memory_layout_is_resumed(rank: int) -> None:
    gradients = Gradients((3, 2), (4,))
    for step in range(2):
        gradients.set(step)
        gradients.step(step)
    state = gradients.optimizer.state_dict()
    gradients.optimizer.load_state_dict(state)
    for parameter in gradients.parameters:
        parameter.data = torch.zeros(parameter.shape[::-1]).permute(
            *reversed(range(parameter.dim()))
        )
    for step in range(2, 4):
        gradients.set(step, lambda each: each.t().contiguous().t() if each.dim() > 1 else each)
        gradients.step(step)
