"""What a step prepares for the next one is used again only while it is still right."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hvdlite.numpy as hvd_numpy
import hvdlite.torch as hvd
from hvdlite.common.api.bundles import bundle_of
from hvdlite.common.api.repeated_call import RepeatedCall
from hvdlite.common.api.tensor_entries import PlacedEntry
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.plain.handles import Handle
from hvdlite.common.runtime.state import current
from hvdlite.torch import mpi_ops
from hvdlite.torch.compression import Compression
from tests.ranks import run_ranks

Tensor = torch.Tensor
pytestmark = pytest.mark.timeout(60)


def values(rank: int, step: int, index: int, shape: tuple[int, ...]) -> Tensor:
    """Whole numbers that differ between ranks, steps and gradients."""
    start = 1000 * step + 100 * index + 10 * rank
    return torch.arange(start, start + max(1, torch.Size(shape).numel())).reshape(shape).float()


class Gradients:
    """Parameters whose gradients a test sets by hand, and their optimizer."""

    def __init__(self, *shapes: tuple[int, ...], **options: Any) -> None:
        self.parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        named = [(f"p{index}", each) for index, each in enumerate(self.parameters)]
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters, lr=1.0), named, **options
        )

    def set(self, step: int, change: Callable[[Tensor], Tensor] = lambda each: each) -> None:
        for index, parameter in enumerate(self.parameters):
            parameter.grad = change(values(hvd.rank(), step, index, tuple(parameter.shape)))

    def check(self, step: int, size: int = 2, tolerance: float = 0.0) -> None:
        """Compare every gradient with the mean that this process computes of all ranks' values."""
        for index, parameter in enumerate(self.parameters):
            shape = tuple(parameter.shape)
            each = [values(rank, step, index, shape) for rank in range(size)]
            assert parameter.grad is not None
            torch.testing.assert_close(
                parameter.grad, torch.stack(each).mean(0), rtol=tolerance, atol=0
            )

    def step(self, step: int, **check: Any) -> None:
        self.optimizer.synchronize()
        self.check(step, **check)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def buckets() -> list[Any]:
    return [*current().buckets.values()]


def test_steady_steps_use_the_same_entries() -> None:
    def main(rank: int) -> None:
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

    run_ranks(2, main)


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
def test_gradients_that_lie_elsewhere_in_each_step(change: Callable[[Tensor], Tensor]) -> None:
    """Steps alternate between plain gradients and changed ones, with the same names."""

    def main(rank: int) -> None:
        gradients = Gradients((3, 4), (4, 3))
        for step in range(5):
            gradients.set(step, change if step % 2 else lambda each: each)
            gradients.step(step)

    run_ranks(2, main)


class Marked(Tensor):
    """A tensor of another class, as frameworks derive them."""


def test_memory_that_is_exchanged_behind_a_tensor() -> None:
    """The tensor stays the same object, and its memory does not."""

    def main(rank: int) -> None:
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

    run_ranks(2, main)


def gradient_options(**changes: Any) -> Any:
    from hvdlite.common.api.options import reduction

    return reduction(None, hvd.Sum, 1.0, 1.0, hvd.global_process_set)._replace(**changes)


def test_a_dtype_that_changes_under_a_name() -> None:
    def main(rank: int) -> None:
        for dtype in (torch.float32, torch.float64, torch.int32, torch.bfloat16, torch.float32):
            tensors = [torch.full((4,), index + rank, dtype=dtype) for index in range(3)]
            bucket = mpi_ops.runner.start_bucket(["a", "b", "c"], tensors, gradient_options())
            bucket.wait()
            for index, tensor in enumerate(tensors):
                assert tensor.equal(torch.full((4,), 2 * index + 1, dtype=dtype))

    run_ranks(2, main)


def test_options_that_change_under_a_name() -> None:
    def main(rank: int) -> None:
        for factor in (1.0, 3.0, 1.0):
            tensors = [torch.ones(2), torch.ones(3)]
            options = gradient_options(postscale_factor=factor)
            mpi_ops.runner.start_bucket(["a", "b"], tensors, options).wait()
            assert all(tensor.eq(2 * factor).all() for tensor in tensors)

    run_ranks(2, main)


def until(ended: Callable[[], bool]) -> None:
    """Sleep until `ended` is true: nobody waits for what it asks about."""
    while not ended():
        threading.Event().wait(0.001)


def test_a_result_that_was_not_taken_survives_the_next_call_of_its_name() -> None:
    def main(rank: int) -> None:
        first, second = torch.ones(3), torch.full((3,), 2.0)
        handle = hvd.allreduce_async_(first, name="t", op=hvd.Sum)
        until(lambda: hvd.poll(handle))
        other = hvd.allreduce_async_(second, name="t", op=hvd.Sum)
        assert hvd.synchronize(handle) is first and hvd.synchronize(other) is second
        assert first.eq(2).all() and second.eq(4).all()

        tensors = [torch.ones(2), torch.ones(2)]
        bucket = mpi_ops.runner.start_bucket(["a", "b"], tensors, gradient_options())
        until(bucket._handle.poll)
        again = [torch.ones(2), torch.ones(2)]
        late = mpi_ops.runner.start_bucket(["a", "b"], again, gradient_options())
        assert late is not bucket
        for each in (bucket, late):
            each.wait()
        assert all(tensor.eq(2).all() for tensor in [*tensors, *again])

    run_ranks(2, main)


def test_a_step_keeps_no_gradient_alive() -> None:
    """The memory of a gradient that the user has dropped is free for the next backward."""

    def main(rank: int) -> None:
        gradients = Gradients((8, 8), (8,))
        for step in range(2):
            gradients.set(step)
            gradients.step(step)
            alive = [weakref.ref(parameter.grad) for parameter in gradients.parameters]
            gradients.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            assert [reference() for reference in alive] == [None, None]

    run_ranks(2, main)


def test_parameters_that_come_and_freeze() -> None:
    def main(rank: int) -> None:
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

    run_ranks(2, main)


def test_a_gradient_that_one_rank_lacks() -> None:
    def main(rank: int) -> None:
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

    run_ranks(2, main)


def test_a_gradient_is_set_to_none_while_it_is_reduced() -> None:
    def main(rank: int) -> None:
        gradients = Gradients((3,), (4,))
        for step in range(3):
            for index, parameter in enumerate(gradients.parameters):
                (parameter * values(rank, step, index, tuple(parameter.shape))).sum().backward()
            gradients.parameters[0].grad = None
            gradients.step(step)
            gradients.optimizer.zero_grad()

    run_ranks(2, main)


@pytest.mark.parametrize("passes", [1, 3])
def test_passes_accumulate(passes: int) -> None:
    def main(rank: int) -> None:
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

    run_ranks(2, main)


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("groups", [None, 1])
def test_compressions_and_groups(compression: Any, groups: int | None) -> None:
    def main(rank: int) -> None:
        gradients = Gradients((3,), (2, 2), compression=compression, groups=groups)
        for step in range(3):
            gradients.set(step)
            gradients.step(step, tolerance=0 if compression is Compression.none else 1e-2)

    run_ranks(2, main)


def test_two_optimizers_take_turns_with_the_same_names() -> None:
    def main(rank: int) -> None:
        both = Gradients((3,), (4,)), Gradients((3,), (4,))
        other_shapes = Gradients((5,), (2, 2))
        for step in range(6):
            for gradients in (*both, other_shapes):
                gradients.set(step)
                gradients.step(step)

    run_ranks(2, main)


def test_process_sets_with_the_same_names() -> None:
    def main(rank: int) -> None:
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

    run_ranks(3, main)


def test_a_rank_joins_while_others_go_on() -> None:
    def main(rank: int) -> None:
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

    run_ranks(2, main)


def test_ranks_that_disagree_on_one_gradient() -> None:
    """The error names it, and the other gradients of the call are reduced, now and later."""

    def main(rank: int) -> None:
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

    run_ranks(2, main)


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


def test_tensors_of_a_group_that_come_to_share_memory() -> None:
    def main(rank: int) -> None:
        options = gradient_options(grouped=True)
        for _ in range(2):
            tensors = [torch.ones(2), torch.ones(2)]
            mpi_ops.runner.start_bucket(["a", "b"], tensors, options).wait()
        shared = torch.ones(2)
        with pytest.raises(ValueError, match="share memory"):
            mpi_ops.runner.start_bucket(["a", "b"], [shared, shared], options)
        mpi_ops.runner.start_bucket(["a", "b"], tensors, options).wait()
        assert all(tensor.eq(4).all() for tensor in tensors)

    run_ranks(2, main)


def test_a_state_with_another_memory_layout_is_resumed() -> None:
    def main(rank: int) -> None:
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

    run_ranks(2, main)


def made_short(runtime: Any) -> int:
    calls = runtime.engine._short_calls
    return 0 if calls is None else int(calls.completed)


def test_a_small_step_is_exchanged_by_the_threads_that_wait() -> None:
    """In any order of the gradients, seen by observers, with the sums of the data plane."""

    def main(rank: int) -> None:
        runtime = current()
        if runtime.engine._short_calls is None:
            pytest.skip("there is no compiled code")
        runs: list[Any] = []
        stop = runtime.engine.observe(runs.append)
        gradients = Gradients((3,), (4, 2), (5,))
        if rank:  # Backward has them in another order on this rank.
            gradients.optimizer._exchange._schedule.rearrange([["p2"], ["p0"], ["p1"]])
        before = None
        for step in range(6):
            gradients.set(step)
            if step == 2:
                before = made_short(runtime)
                runs.clear()
            gradients.step(step)
        assert before is not None and made_short(runtime) > before
        stop()
        shown = [run for run in runs if run.names[0].startswith("allreduce.p")]
        assert {len(run.names) for run in shown} == {3}
        assert all(0 < run.ready <= run.start <= run.end for run in shown)
        starts.append([run.start for run in shown])

    starts: list[list[float]] = []
    run_ranks(2, main)
    # Short calls begin on all ranks when the last one has come; a step may have been negotiated.
    assert not starts or set(starts[0]) & set(starts[1])


def test_a_small_step_to_which_a_rank_comes_late() -> None:
    """The others turn to the coordinator, and the late one finds its gradients reduced."""

    def main(rank: int) -> None:
        gradients = Gradients((3,), (4, 2))
        for step in range(6):
            gradients.set(step)
            if step % 2 == rank:
                threading.Event().wait(0.03)
            gradients.step(step)

    run_ranks(2, main)


def test_a_small_step_that_one_rank_does_not_wait_for() -> None:
    """Rank 1 sends gradients one by one, from the hooks of backward."""

    def main(rank: int) -> None:
        gradients = Gradients((3,), (4, 2))
        if rank:
            gradients.optimizer._exchange._enough_bytes = 0
            gradients.optimizer._exchange._find_enough_bytes = lambda: None
        for step in range(5):
            for index, parameter in enumerate(gradients.parameters):
                (parameter * values(rank, step, index, tuple(parameter.shape))).sum().backward()
            gradients.step(step)
            gradients.optimizer.zero_grad()

    run_ranks(2, main)


@pytest.mark.parametrize("before", [False, True], ids=["after the exchange", "before"])
def test_ctrl_c_in_a_small_step(before: bool) -> None:
    """The other rank gets its gradients, and this one goes on with the same names."""

    def main(rank: int) -> None:
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
            until(lambda: all(each._handle.poll() for each in buckets()))
            gradients.check(2)
            gradients.optimizer.zero_grad()
        else:
            gradients.step(2)
        gradients.set(3)
        gradients.step(3)

    run_ranks(2, main)


def test_a_small_step_that_one_rank_gives_up() -> None:
    """It has begun the step, and loads a state instead: the other rank has its gradients."""

    def main(rank: int) -> None:
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
            until(lambda: all(each._handle.poll() for each in buckets()))
            gradients.check(1)
        else:
            gradients.step(1)
        gradients.set(2)
        gradients.step(2)

    run_ranks(2, main)


def test_a_rank_that_dies_in_a_small_step_is_named() -> None:
    def main(rank: int) -> None:
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

    run_ranks(2, main)


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
        assert bundle_of(entries(small)) is None  # the entry is a short call by itself
        assert bundle_of(entries(small, torch.ones(1, dtype=torch.float64))) is None
        assert bundle_of(entries(small, torch.ones(2, 2).t()[:1])) is None
        assert bundle_of(entries(large, small)) is None
        assert bundle_of(entries(torch.ones(0), torch.ones(0))) is None

    options = gradient_options()
    run_ranks(1, main)


def test_calls_that_come_again_make_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[type] = []

    def counting(kind: type) -> None:
        init: Any = kind.__init__

        def counted(self: Any, *args: Any) -> None:
            made.append(type(self))
            init(self, *args)

        monkeypatch.setattr(kind, "__init__", counted)

    def main(rank: int) -> None:
        tensors = [torch.zeros(3), torch.zeros(2, 2)]
        for step in range(4):
            if step == 2:
                hvd.barrier()
                made.clear()
                meeting.wait()
            for index, tensor in enumerate(tensors):
                tensor.fill_(step + index + rank)
            handles = [
                hvd.allreduce_async_(tensor, name=f"t{index}", op=hvd.Sum)
                for index, tensor in enumerate(tensors)
            ]
            for index, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
                assert hvd.synchronize(handle) is tensor
                assert tensor.eq(2 * (step + index) + 1).all()
        meeting.wait()
        assert made == []

    meeting = threading.Barrier(2, timeout=30)
    for kind in (PlacedEntry, Handle, RepeatedCall):
        counting(kind)
    run_ranks(2, main)


def test_calls_are_kept_no_longer_than_what_was_prepared_for_them() -> None:
    """Names that never come again make no list that grows."""

    def main(rank: int) -> None:
        runtime, tensor = current(), torch.ones(1)
        for name in "ab":
            hvd.allreduce_(tensor, name=name, op=hvd.Sum)
            handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
            if name == "b":
                runtime.forget_calls()
            hvd.synchronize(handle)
            assert set(runtime.repeated) == ({"allreduce.a"} if name == "a" else set())

    run_ranks(1, main)


def test_a_call_that_comes_again_after_an_error_and_with_other_tensors() -> None:
    def main(rank: int) -> None:
        def reduced(tensor: Any, module: Any = hvd, **options: Any) -> Any:
            return module.synchronize(module.allreduce_async_(tensor, name="t", **options))

        for _ in range(3):
            assert reduced(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
        with pytest.raises(HorovodInternalError, match=r"\(3,\).*\(4,\)"):
            reduced(torch.ones(3 + rank), op=hvd.Sum)
        for _ in range(2):
            assert reduced(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
            assert reduced(torch.ones(3), op=hvd.Average).tolist() == [1, 1, 1]
            assert reduced(torch.ones(3, dtype=torch.int32), op=hvd.Sum).tolist() == [2, 2, 2]
            assert reduced(torch.ones(2, 3).t(), op=hvd.Sum).shape == (3, 2)
            array = np.ones(3, np.float32)
            assert reduced(array, hvd_numpy, op=hvd.Sum) is array and array.tolist() == [2, 2, 2]

    run_ranks(2, main)
