"""Small steps, which the threads that wait exchange themselves."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite.numpy as hvd_numpy
import hvdlite.torch as hvd
from hvdlite.common.api import prepared_bucket
from hvdlite.common.api.prepared_bucket import bundle_of
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.native import short_call
from hvdlite.common.runtime.current import current
from hvdlite.torch import mpi_ops
from hvdlite.torch.optimizer import gradient_exchange, in_flight
from tests.ranks import run_ranks
from tests.short_calls import begin, interrupted_after, until
from tests.torch.on_ranks import on_ranks
from tests.torch.prepared_gradients import Gradients, Tensor, buckets, gradient_options, values

pytestmark = pytest.mark.timeout(120)


def made_short(runtime: Any) -> int:
    calls = runtime.engine._short_calls
    return 0 if calls is None else int(calls.completed)


@pytest.mark.parametrize(("ranks", "width"), [(2, 4), (3, 150_000)], ids=["", "divided"])
def test_a_small_step_is_exchanged_by_the_threads_that_wait(
    ranks: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of the gradients, seen by observers, with the sums of the data plane."""
    monkeypatch.setattr(short_call, "TIMEOUT_SECONDS", 2.0)  # On a busy machine, too.

    def main(rank: int) -> None:
        runtime = current()
        if runtime.engine._short_calls is None:
            pytest.skip("there is no compiled code")
        runs: list[Any] = []
        stop = runtime.engine.observe(runs.append)
        gradients = Gradients((3,), (width,), (5,))
        if rank:  # Backward has them in another order on this rank.
            gradients.optimizer._exchange._schedule.rearrange([["p2"], ["p0"], ["p1"]])
        before = None
        for step in range(6):
            gradients.set(step)
            if step == 2:
                before = made_short(runtime)
                runs.clear()
            gradients.step(step, size=ranks, tolerance=1e-6 * (ranks - 2))
        assert before is not None and made_short(runtime) > before
        stop()
        shown = [run for run in runs if run.names[0].startswith("allreduce.p")]
        assert 3 in {len(run.names) for run in shown}  # Others were negotiated.
        assert [run for run in shown if not 0 < run.ready <= run.start <= run.end] == []
        starts.append([run.start for run in shown])

    starts: list[list[float]] = []
    run_ranks(ranks, main)
    # Short calls begin on all ranks when the last one has come; a step may have been negotiated.
    assert not starts or set(starts[0]) & set(starts[1])


def test_a_small_segment_is_exchanged_by_the_threads_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last hook announces it, and the step exchanges it."""
    monkeypatch.setattr(short_call, "TIMEOUT_SECONDS", 2.0)

    def main(rank: int) -> None:
        runtime = current()
        if runtime.engine._short_calls is None:
            pytest.skip("there is no compiled code")
        model = torch.nn.Linear(3, 2)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model.named_parameters(),
            gradient_as_bucket_view=True,
        )
        before = 0
        for step in range(6):
            if step == 3:  # The segment is known, and its gradients are views of it.
                before = made_short(runtime)
            optimizer.zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            optimizer.synchronize()
            assert model.weight.grad is not None
            assert model.weight.grad.tolist() == [[1.5] * 3] * 2
            with optimizer.skip_synchronize():
                optimizer.step()
        assert made_short(runtime) > before

    run_ranks(2, main)


@on_ranks(2)
def test_a_small_step_to_which_a_rank_comes_late(rank: int) -> None:
    """The others turn to the coordinator, and the late one finds its gradients reduced."""
    gradients = Gradients((3,), (4, 2))
    for step in range(6):
        gradients.set(step)
        if step % 2 == rank:
            threading.Event().wait(0.03)
        gradients.step(step)


@on_ranks(2)
def test_a_small_step_that_one_rank_does_not_wait_for(rank: int) -> None:
    """Rank 1 sends gradients one by one, from the hooks of backward."""
    gradients = Gradients((3,), (4, 2))
    if rank:
        gradients.optimizer._exchange._enough_bytes = 0
        gradients.optimizer._exchange._find_enough_bytes = lambda: None
    for step in range(5):
        for index, parameter in enumerate(gradients.parameters):
            (parameter * values(rank, step, index, tuple(parameter.shape))).sum().backward()
        gradients.step(step)
        gradients.optimizer.zero_grad()


@pytest.mark.parametrize("before", [False, True], ids=["after the exchange", "before"])
@on_ranks(2)
def test_ctrl_c_in_a_small_step(rank: int, before: bool) -> None:
    """The other rank gets its gradients, and this one goes on with the same names."""
    calls = current().engine._short_calls
    if calls is None:
        pytest.skip("there is no compiled code")
    gradients = Gradients((3,), (4, 2))
    for step in range(2):
        gradients.set(step)
        gradients.step(step)
    gradients.set(2)
    if rank == 0:
        exchange = calls._exchange
        run = exchange.run

        def interrupted(call: Any) -> None:
            exchange.run = run  # type: ignore[method-assign]
            if not before:
                run(call)
            raise KeyboardInterrupt

        exchange.run = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            gradients.optimizer.synchronize()
        until(lambda: all(each.handle.poll() for each in buckets()))
        gradients.check(2)
        gradients.optimizer.zero_grad()
    else:
        gradients.step(2)
    gradients.set(3)
    gradients.step(3)


@on_ranks(2)
def test_ctrl_c_at_any_point_of_a_small_step(rank: int) -> None:
    """The other rank gets its gradients, and this one goes on with the same names."""
    gradients, engine = Gradients((3,), (4, 2)), current().engine
    begin()
    for points in range(1000):
        gradients.set(points)
        go_on = np.zeros(1)
        if rank:
            gradients.step(points)
        else:
            go_on += interrupted_after(
                engine, "add_pending", points, [prepared_bucket, gradient_exchange, in_flight],
                gradients.optimizer.synchronize,
            )  # fmt: skip
            until(lambda: not engine._pending._entries)
            assert not gradients.optimizer._exchange._waits_next, points  # hooks send at once
            gradients.optimizer.load_state_dict(gradients.optimizer.state_dict())
        gradients.optimizer.zero_grad()
        if not hvd_numpy.allreduce(go_on, name="go on", op=hvd.Sum)[0]:
            break
    assert 5 < points < 200
    gradients.set(0)
    gradients.step(0)


@on_ranks(2)
def test_a_small_step_that_one_rank_gives_up(rank: int) -> None:
    """It has begun the step, and loads a state instead: the other rank has its gradients."""
    gradients = Gradients((3,), (4, 2))
    gradients.set(0)
    gradients.step(0)
    gradients.set(1)
    if rank == 0:
        exchange = gradients.optimizer._exchange
        exchange._gather(["p0"])
        exchange._gather(["p1"])
        exchange._send_all()
        gradients.optimizer.load_state_dict(gradients.optimizer.state_dict())
        until(lambda: all(each.handle.poll() for each in buckets()))
        gradients.check(1)
    else:
        gradients.step(1)
    gradients.set(2)
    gradients.step(2)


@on_ranks(2)
def test_a_rank_that_dies_in_a_small_step_is_named(rank: int) -> None:
    gradients = Gradients((3,), (4, 2))
    gradients.set(0)
    gradients.step(0)
    if rank == 1:
        current().transport.close()
        return
    gradients.set(1)
    with pytest.raises(HorovodInternalError, match="rank 1"):
        gradients.optimizer.synchronize()
    assert not gradients.optimizer._exchange.busy


def test_what_can_be_one_short_call() -> None:
    def entries(*tensors: Tensor) -> list[Any]:
        runner, runtime = mpi_ops.runner, current()
        bucket = runner.start_bucket([f"t{i}" for i in range(len(tensors))], tensors, options)
        bucket.wait()
        assert bucket in runtime.buckets.values()
        return bucket._entries

    def main(rank: int) -> None:
        small, large = torch.ones(3), torch.ones(1 << 18)
        assert bundle_of(entries(small, torch.ones(2, 2))) is not None
        assert bundle_of(entries(small)) is not None
        assert bundle_of(entries(small, torch.ones(1, dtype=torch.float64))) is None
        assert bundle_of(entries(small, torch.ones(2, 2).t()[:1])) is None
        assert bundle_of(entries(large, small)) is None
        assert bundle_of(entries(torch.ones(0), torch.ones(0))) is None

    options = gradient_options()
    run_ranks(1, main)
