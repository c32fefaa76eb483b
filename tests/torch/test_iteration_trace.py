"""The iteration trace in training loops of PyTorch: what is seen, and that nothing stays behind."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import hvdlite.torch as hvd
from hvdlite.common.iterations.rows import IterationRow, read_rows
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from tests.ranks import run_ranks
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(120)

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
NBYTES = 4 * sum(parameter.numel() for parameter in NET.parameters())
Clock = dict[str, float]


def net() -> nn.Sequential:
    """A new copy: torch has one random generator for all threads."""
    return copy.deepcopy(NET)


def sgd(*models: nn.Module) -> Any:
    named = [
        (f"{k}.{name}", parameter)
        for k, model in enumerate(models)
        for name, parameter in model.named_parameters()
    ]
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1), named


def distributed(*models: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(*sgd(*models), **options)


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(5, 3)).square().sum()
    return loss


def train(model: Any, optimizer: Any, steps: int = 1) -> list[Clock]:
    """The ordinary loop, and what the clock said around each phase."""
    clocks = []
    for _ in range(steps):
        clock = {}
        optimizer.zero_grad()
        clock["forward"] = time.monotonic()
        loss = loss_of(model)
        clock["loss"] = time.monotonic()
        loss.backward()
        clock["backward"] = time.monotonic()
        optimizer.step()
        clock["step"] = time.monotonic()
        clocks.append(clock)
    return clocks


def check(row: IterationRow, clock: Clock, first: Clock | None = None) -> None:
    """The row lies where the clock readings say; where forward begins, `first` may say."""
    assert row.fp_end is not None and row.bp_end is not None and row.optimizer_time is not None
    begin = first or clock
    assert begin["forward"] <= row.fp_start <= begin["loss"]
    assert clock["forward"] <= row.fp_end <= clock["loss"] <= row.bp_end <= clock["backward"]
    assert clock["backward"] <= row.iteration_end <= clock["step"]
    assert 0 < row.optimizer_time < clock["step"] - clock["backward"]
    for segment in row.segments:
        assert clock["loss"] <= segment.start < segment.end <= row.iteration_end


@pytest.mark.parametrize("size", [1, 3])
def test_the_ordinary_loop(size: int) -> None:
    models = [net() for _ in range(size)]

    def main(rank: int) -> None:
        optimizer = distributed(models[rank])
        with hvd.trace_iterations() as trace:
            clocks = train(models[rank], optimizer, 4)
            rows = trace.rows()
        assert [(row.iteration, row.rank) for row in rows] == [(k, rank) for k in range(4)]
        for row, clock in zip(rows, clocks, strict=True):
            check(row, clock)
            assert sum(segment.bytes for segment in row.segments) == (NBYTES if size > 1 else 0)
        assert rows[0].data_time is None
        for before, row in pairwise(rows):
            assert row.data_time == pytest.approx(row.fp_start - before.iteration_end)

    run_ranks(size, main)


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Adasum},
        {"groups": 2},
        {"compression": hvd.Compression.fp16},
        {"backward_passes_per_step": 2},
    ],
    ids=str,
)
def test_options_of_the_optimizer(options: dict[str, Any]) -> None:
    models = [net() for _ in range(2)]
    passes = options.get("backward_passes_per_step", 1)

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = distributed(model, **options)
        with hvd.trace_iterations() as trace:
            for _ in range(2):
                optimizer.zero_grad()
                for _ in range(passes):
                    loss_of(model).backward()
                optimizer.step()
            rows = trace.rows()
        scale = 2 if "compression" in options else 1
        for row in rows:
            assert sum(segment.bytes for segment in row.segments) == NBYTES / scale
            assert row.segments[-1].end <= row.iteration_end
        assert len(rows) == 2

    run_ranks(2, main)


@on_ranks(1)
def test_several_passes_count_from_the_first_forward_to_the_last_backward(rank: int) -> None:
    model = net()
    optimizer = distributed(model, backward_passes_per_step=2)
    with hvd.trace_iterations() as trace:
        first: Clock = {"forward": time.monotonic()}
        loss = loss_of(model)
        first["loss"] = time.monotonic()
        loss.backward()
        clock = {"forward": time.monotonic()}
        loss = loss_of(model)
        clock["loss"] = time.monotonic()
        loss.backward()
        clock["backward"] = time.monotonic()
        optimizer.step()
        clock["step"] = time.monotonic()
        check(trace.rows()[0], clock, first)


@on_ranks(2)
def test_a_sparse_gradient_is_part_of_the_communication(rank: int) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = distributed(model)
    with hvd.trace_iterations() as trace:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        (row,) = trace.rows()
    assert sum(segment.bytes for segment in row.segments) == 2 * 4 * 4 + 2 * 8


def test_a_closure_is_no_part_of_the_optimizers_own_time() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = distributed(model)
        entered = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            entered.append(time.monotonic())
            return loss

        with hvd.trace_iterations() as trace:
            optimizer.step(closure)
            (row,) = trace.rows()
        assert row.bp_end is not None and row.bp_end <= entered[0]
        assert row.optimizer_time is not None
        assert row.optimizer_time <= row.iteration_end - row.segments[-1].end

    run_ranks(2, main)


def test_other_collectives_and_forward_without_gradients_do_not_count() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = distributed(model)
        with hvd.trace_iterations() as trace:
            with torch.no_grad():
                loss_of(model)
            hvd.allreduce(torch.ones(1000), name="metric")
            (clock,) = train(model, optimizer)
            hvd.allreduce(torch.ones(1000), name="0.weight.metric.average")
            (row,) = trace.rows()
        check(row, clock)
        assert sum(segment.bytes for segment in row.segments) == NBYTES

    run_ranks(2, main)


def test_parameters_that_are_broadcast_are_no_part_of_the_first_iteration() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        wrapped, named = sgd(models[rank])
        optimizer = hvd.DistributedOptimizer(wrapped, named)
        with hvd.trace_iterations() as trace:
            hvd.broadcast_parameters(dict(named), root_rank=0)
            (clock,) = train(models[rank], optimizer)
            (row,) = trace.rows()
        check(row, clock)
        assert sum(segment.bytes for segment in row.segments) == NBYTES

    run_ranks(2, main)


@on_ranks(1)
def test_thrown_away_gradients_are_not_part_of_the_next_iteration(rank: int) -> None:
    model = net()
    optimizer = distributed(model)
    with hvd.trace_iterations() as trace:
        loss_of(model).backward()
        (clock,) = train(model, optimizer)  # begins with zero_grad
        (row,) = trace.rows()
    check(row, clock)


@on_ranks(1)
def test_zero_grad_between_forward_and_backward_changes_nothing(rank: int) -> None:
    model = net()
    optimizer = distributed(model)
    with hvd.trace_iterations() as trace:
        clock = {"forward": time.monotonic()}
        loss = loss_of(model)
        clock["loss"] = time.monotonic()
        optimizer.zero_grad()
        loss.backward()
        clock["backward"] = time.monotonic()
        optimizer.step()
        clock["step"] = time.monotonic()
        check(trace.rows()[0], clock)


@on_ranks(1)
def test_a_trace_that_begins_in_the_middle_leaves_that_iteration_out(rank: int) -> None:
    model = net()
    optimizer = distributed(model)
    loss = loss_of(model)
    with hvd.trace_iterations() as trace:
        loss.backward()
        optimizer.step()
        assert trace.rows() == []
        (clock,) = train(model, optimizer)
        check(trace.rows()[0], clock)


@on_ranks(1)
def test_a_backward_that_raises_does_not_blind_the_trace(rank: int) -> None:
    model = net()
    optimizer = distributed(model)

    def refuse(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    with hvd.trace_iterations() as trace:
        train(model, optimizer)
        hook = model[0].weight.register_hook(refuse)
        with pytest.raises(ArithmeticError):
            loss_of(model).backward()
        hook.remove()
        optimizer.load_state_dict(optimizer.state_dict())
        (clock,) = train(model, optimizer)
        row = trace.rows()[-1]
    assert row.bp_end is not None and clock["loss"] <= row.bp_end <= clock["backward"]


class _Wrapper(nn.Module):
    """A module without parameters of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(inputs)
        return result


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize(
    "kind", ["wrapped", "parts", "checkpointed", "compiled", "compiled in place"]
)
@on_ranks(1)
def test_models_are_found(rank: int, kind: str) -> None:
    model: Any = net()
    optimizer = distributed(model)
    called: Callable[[torch.Tensor], torch.Tensor] = model
    if kind == "wrapped":
        called = _Wrapper(_Wrapper(model))
    elif kind == "parts":
        called = lambda inputs: model[2](model[1](model[0](inputs)))  # noqa: E731
    elif kind == "checkpointed":
        ask = torch.utils.checkpoint.checkpoint
        called = lambda inputs: ask(model, inputs.requires_grad_(), use_reentrant=True)  # noqa: E731
    elif kind == "compiled in place":
        model.compile(backend="eager")
    elif kind == "compiled":
        called = torch.compile(model, backend="eager")
    with hvd.trace_iterations() as trace:
        clocks = train(called, optimizer, 3)
        rows = trace.rows()
    assert len(rows) == 3
    if kind == "checkpointed":  # forward runs again during backward
        clocks = [{**clock, "loss": clock["backward"]} for clock in clocks]
        ends = [clock["backward"] for clock in clocks]
        rows = [row._replace(bp_end=end) for row, end in zip(rows, ends, strict=True)]
    for row, clock in zip(rows, clocks, strict=True):
        check(row, clock)


@pytest.mark.parametrize("steps", ["aaabbb", "ababab", "bbaabb"])
@on_ranks(1)
def test_steps_that_run_another_module_are_seen(rank: int, steps: str) -> None:
    """All but the first of them, in which it is found missing; the counts see what a trace does."""
    models = {"a": net(), "b": net()}
    optimizer = distributed(*models.values())
    hvd.metrics()
    model = models[steps[0]]
    with hvd.trace_iterations() as trace, no_warnings():
        for step in steps:
            train(models[step], optimizer)
        rows, values = trace.rows(), hvd.metrics()
        hooks = sum(hooks_of(model, optimizer)[3:])
        train(model, optimizer)
        assert sum(hooks_of(model, optimizer)[3:]) == hooks, "it is found once"
    assert len(rows) == values["steps_total"] == len(steps) - 1
    assert values["samples_total"] == 5 * len(rows)
    assert not torch_module._global_forward_pre_hooks


@on_ranks(1)
def test_samples_of_all_passes_are_counted_once(rank: int) -> None:
    model = net()
    optimizer = distributed(model, backward_passes_per_step=2)
    hvd.metrics()
    for step in range(3):
        for _ in range(2):
            loss_of(model).backward()
        optimizer.step()
        assert hvd.metrics()["samples_total"] == (step + 1) * 2 * 5


def test_two_optimizers_have_rows_of_their_own() -> None:
    models = [[net(), net()] for _ in range(2)]

    def main(rank: int) -> None:
        one, two = models[rank]
        optimizers = [hvd.DistributedOptimizer(sgd(each)[0]) for each in (one, two)]
        with hvd.trace_iterations() as trace:
            clocks = [
                train(model, optimizer)[0]
                for _ in range(2)
                for model, optimizer in zip((one, two), optimizers, strict=True)
            ]
            rows = trace.rows()
        for row, clock in zip(rows, clocks, strict=True):
            check(row, clock)
            assert sum(segment.bytes for segment in row.segments) == NBYTES

    run_ranks(2, main)


# -- files


def test_every_rank_has_a_file_and_gather_has_all_rows(tmp_path: Path) -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> list[IterationRow]:
        optimizer = distributed(models[rank])
        with hvd.trace_iterations(str(tmp_path / "t.csv")) as trace:
            train(models[rank], optimizer, 3)
            return trace.gather()

    of_ranks = run_ranks(2, main)
    assert of_ranks[0] == of_ranks[1]
    assert [row[:2] for row in of_ranks[0]] == [(k, rank) for k in range(3) for rank in range(2)]
    for rank in range(2):
        rows = read_rows(str(tmp_path / f"t.rank{rank}.csv"))
        own = [row for row in of_ranks[0] if row.rank == rank]
        assert [row[:2] for row in rows] == [row[:2] for row in own]
        for read, row in zip(rows, own, strict=True):
            assert read.fp_start == pytest.approx(row.fp_start, abs=1e-8)
            assert [each.bytes for each in read.segments] == [each.bytes for each in row.segments]


@pytest.mark.parametrize("begin", ["before the optimizer", "by the settings"])
def test_how_a_trace_begins(tmp_path: Path, begin: str) -> None:
    path = str(tmp_path / "t.csv")
    setting = begin == "by the settings"

    def main(rank: int) -> None:
        if not setting:
            hvd.trace_iterations(path)
        model = net()
        optimizer = distributed(model)
        train(model, optimizer, 2)
        distributed(net())  # a second one begins no second trace

    run_ranks(1, main, config=Config(trace_iterations=path if setting else ""))
    assert len(read_rows(str(tmp_path / "t.rank0.csv"))) == 2  # complete after shutdown


def test_an_optimizer_goes_on_after_another_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts, traces of the script and that of the settings; no row of before is overwritten."""
    monkeypatch.setenv("HVDLITE_TRACE_ITERATIONS", str(tmp_path / "t.csv"))
    model = net()
    hvd.init()
    try:
        optimizer = distributed(model)
        train(model, optimizer, 2)
        for steps in (3, 1):
            hvd.shutdown()
            hvd.init()
            hvd.metrics()
            with hvd.trace_iterations() as trace:
                train(model, optimizer, steps)
            assert (len(trace.rows()), hvd.metrics()["steps_total"]) == (steps, steps)
    finally:
        hvd.shutdown()
    files = ("t.rank0.csv", "t.world1.rank0.csv", "t.world2.rank0.csv")
    assert [len(read_rows(str(tmp_path / file))) for file in files] == [2, 3, 1]


def test_wrong_paths_are_refused_at_once(tmp_path: Path) -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"'t\.txt'"):
            hvd.trace_iterations("t.txt")
        with pytest.raises(OSError, match="none"):
            hvd.trace_iterations(str(tmp_path / "none" / "t.csv"))

    run_ranks(1, main)
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.trace_iterations()


PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
import hvdlite.torch as hvd
from tests.ranks import run_ranks

def main(rank):
    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    hvd.trace_iterations(sys.argv[1])
    path = Path(sys.argv[1]).with_suffix(".rank0.csv")
    while path.read_text().count("\\n") < 3:
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    os.kill(os.getpid(), signal.SIGKILL)

run_ranks(1, main)
"""


def test_a_run_that_is_killed_keeps_its_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "t.csv")]
    done = subprocess.run(command, check=False, timeout=50, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    rows = read_rows(str(tmp_path / "t.rank0.csv"))
    assert [row.iteration for row in rows] == list(range(len(rows))) and len(rows) >= 2


# -- nothing stays behind


def hooks_of(model: nn.Module, optimizer: Any) -> list[int]:
    """How many hooks there are, by place."""
    places = [
        torch_module._global_forward_pre_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    ]
    for each in model.modules():
        places += [each._forward_pre_hooks, each._forward_hooks]
    places += [each._post_accumulate_grad_hooks or {} for each in model.parameters()]
    return list(map(len, places))


@pytest.mark.parametrize("steps", [0, 1, 3])
@on_ranks(1)
def test_stop_removes_every_hook(rank: int, steps: int) -> None:
    model = net()
    optimizer = distributed(model)
    before = hooks_of(model, optimizer)
    observers = current().engine._executor.observers
    trace = hvd.trace_iterations()
    train(model, optimizer, steps)
    trace.stop()
    trace.stop()
    assert hooks_of(model, optimizer) == before
    assert current().engine._executor.observers == observers
    train(model, optimizer)
    assert len(trace.rows()) == steps


@on_ranks(1)
def test_a_trace_keeps_neither_model_nor_optimizer_alive(rank: int) -> None:
    with hvd.trace_iterations():
        model = net()
        optimizer = distributed(model)
        train(model, optimizer, 2)
        alive = [weakref.ref(each) for each in (model, model[0].weight, optimizer)]
        del model, optimizer
        gc.collect()
        assert [each() for each in alive] == [None] * 3


@on_ranks(1)
def test_a_model_can_be_copied_and_pickled_while_it_is_traced(rank: int) -> None:
    model = net()
    optimizer = distributed(model)
    with hvd.trace_iterations() as trace:
        train(model, optimizer, 2)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(torch.ones(5, 3)), model(torch.ones(5, 3)))
        assert len(trace.rows()) == 2


# -- blocks


@contextmanager
def no_warnings() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def functional_loss(weight: nn.Parameter) -> torch.Tensor:
    return (torch.ones(5, 3) @ weight).square().sum()


@on_ranks(1)
def test_a_loop_that_hooks_cannot_see_is_warned_about_once(rank: int) -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    with hvd.trace_iterations() as trace:
        with pytest.warns(UserWarning, match=r"with trace\.iteration\(\)"):
            for _ in range(2):
                functional_loss(weight).backward()
                optimizer.step()
        with no_warnings():
            functional_loss(weight).backward()
            optimizer.step()
        assert trace.rows() == []


def test_a_block_is_an_iteration_and_hooks_fill_in_what_is_not_told() -> None:
    weights = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]

    def main(rank: int) -> None:
        weight = weights[rank]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
        with hvd.trace_iterations() as trace, no_warnings():
            for _ in range(3):
                clock = {"forward": time.monotonic()}
                with trace.iteration() as it:
                    loss = functional_loss(weight)
                    it.forward_done()
                    clock["loss"] = time.monotonic()
                    loss.backward()
                    clock["backward"] = time.monotonic()
                    optimizer.step()
                clock["step"] = time.monotonic()
                check(trace.rows()[-1], clock)
            rows = trace.rows()
        assert [row.iteration for row in rows] == [0, 1, 2]
        assert all(sum(each.bytes for each in row.segments) == 24 for row in rows)

    run_ranks(2, main)


@on_ranks(2)
def test_a_block_without_an_optimizer_of_ours_takes_all_reductions(rank: int) -> None:
    with hvd.trace_iterations() as trace:
        hvd.allreduce(torch.ones(3), name="before")
        with trace.iteration() as it:
            it.forward_done()
            ready = time.monotonic()
            hvd.allreduce(torch.ones(10), name="one")
            hvd.allgather(torch.ones(10), name="no reduction")
            it.reduced()
            reduced = time.monotonic()
        (row,) = trace.rows()
    assert [each.bytes for each in row.segments] == [40]
    assert row.bp_end is not None and ready <= row.bp_end <= row.segments[0].start
    assert row.optimizer_time is not None
    assert row.optimizer_time >= row.iteration_end - reduced


@on_ranks(1)
def test_blocks_that_raise_or_are_inside_each_other(rank: int) -> None:
    with hvd.trace_iterations() as trace:
        with pytest.raises(ArithmeticError), trace.iteration():
            raise ArithmeticError
        with trace.iteration(), pytest.raises(RuntimeError, match="inside"):
            trace.iteration().__enter__()
        assert len(trace.rows()) == 1
