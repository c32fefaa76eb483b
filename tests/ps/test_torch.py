"""Clusters of real processes that train a network of PyTorch."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from hvdlite.torch import ps
from tests.ps.digits import OPTIMIZERS, accuracy, batch, loss_of, network, train_in_one
from tests.ps.processes import cluster
from tests.ps.scripts import torch_mixed
from tests.ps.scripts.torch_digits import main, main_with_schedule
from tests.ps.sites import Site


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(("name", "workers"), [("sgd", 2), ("adam", 2), ("adam", 3)])
def test_sync_is_bitwise_one_process(site: Site, name: str, workers: int) -> None:
    with cluster(site, 2, workers, main, "sync", None, name, 60) as job:
        assert not job.wait_for_all()
    wanted = train_in_one(name, workers, 60)
    assert all(same(job.weights(number), wanted) for number in range(workers))


@pytest.mark.parametrize("dialect", ["MindSpore", "ps-lite"])
def test_processes_are_started_with_the_names_of_others(site: Site, dialect: str) -> None:
    """A scheduler, a server and a worker, as an operator for MindSpore starts them."""
    words = "sync", None, "adam", 40
    with cluster(site, 1, 1, main, *words, dialect=dialect) as job:
        assert not job.wait_for_all()
    assert same(job.weights(0), train_in_one("adam", 1, 40))


def test_a_worker_that_stops_holds_nobody_up_in_async(site: Site) -> None:
    os.mkfifo(site.folder / "go")
    words = "async", None, "sgd", 300
    with cluster(site, 2, 2, main, *words, HALT="worker1:20", SAY="worker0:299") as job:
        job.wait_for_file("reached")
        (site.folder / "go").write_text("")
        assert not job.wait_for_all()
    assert accuracy(job.weights(1)) > 0.93


@pytest.mark.soak
def test_a_slow_worker_is_waited_for_in_ssp(site: Site) -> None:
    staleness = 2
    words = "ssp", staleness, "sgd", 300
    with cluster(site, 2, 2, main, *words, SLOW="0.003") as job:
        assert not job.wait_for_all()
    assert accuracy(job.weights(1)) > 0.93
    fast, slow = job.times(0), job.times(1)
    ahead = max(step - sum(end <= at for end in slow[1:]) for step, at in enumerate(fast))
    assert ahead <= staleness + 1 + 1  # A step ends a little after its push.


def test_servers_and_allreduce_differ_by_the_order_of_sums_alone(site: Site) -> None:
    """With three ranks, of which each adds gradients up in another order."""
    words = None, False, False
    with cluster(site, 2, 3, torch_mixed.main, *words, HVDLITE_PS_WORKERS="mpi") as job:
        assert not job.wait_for_all()
    found = torch.load(site.folder / "worker2.pt")
    for name, wanted in found["reduced"].items():
        assert (found["mixed"][name] - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.soak
@pytest.mark.parametrize(("name", "workers"), [("sgd", 2), ("adam", 2), ("sgd", 3)])
def test_a_whole_training_is_bitwise_one_process(site: Site, name: str, workers: int) -> None:
    with cluster(site, 2, workers, main, "sync", None, name, 300) as job:
        assert not job.wait_for_all()
    assert same(job.weights(0), train_in_one(name, workers, 300))
    assert accuracy(job.weights(0)) > 0.94


def test_a_killed_worker_returns_and_the_run_is_bitwise_undisturbed(site: Site) -> None:
    with cluster(site, 2, 2, main, "sync", None, "sgd", 60, DIE="worker1:20") as job:
        assert job.wait("worker1") == -signal.SIGKILL
        job.start("worker", 1)
        assert not job.wait_for_all()
    assert all(same(job.weights(number), train_in_one("sgd", 2, 60)) for number in range(2))


def test_whole_tensors_are_stepped_over_in_their_shapes(site: Site) -> None:
    words = "sync", None, "norms", 20, "tensor"
    with cluster(site, 2, 2, main, *words) as job:
        assert not job.wait_for_all()
    assert same(job.weights(0), train_in_one("norms", 2, 20))


def train_with_schedule(steps: int, overflow_step: int) -> dict[str, torch.Tensor]:
    """Return what one process makes of `main_with_schedule`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(steps):
        totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for worker in range(2):
            model.zero_grad()
            for part in range(2):
                loss_of(model, *batch(2 * step + part, worker, 2)).backward()
            totals = [
                total + parameter.grad
                for total, parameter in zip(totals, model.parameters(), strict=True)
            ]
        for total, parameter in zip(totals, model.parameters(), strict=True):
            parameter.grad = total
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (step // 5)
        if step != overflow_step:
            optimizer.step()
    torch.set_num_threads(threads)
    return model.state_dict()


def test_schedules_travel_and_an_overflow_skips_the_step_everywhere(site: Site) -> None:
    """With two backward passes a step, and sums of the workers' gradients."""
    with cluster(site, 2, 2, main_with_schedule, 12, 7) as job:
        assert not job.wait_for_all()
    wanted = train_with_schedule(12, 7)
    assert all(same(job.weights(number), wanted) for number in range(2))


@pytest.mark.parametrize(
    ("parameters", "mark", "clip"),
    [(None, False, False), (["0.*"], False, True), (None, True, False)],
    ids=["all by servers", "patterns", "set_param_ps"],
)  # fmt: skip
def test_servers_and_allreduce_make_the_same_steps(
    site: Site, parameters: list[str] | None, mark: bool, clip: bool
) -> None:
    """Bitwise for two ranks, whichever parameters go by servers."""
    words = parameters, mark, clip
    with cluster(site, 1, 2, torch_mixed.main, *words, HVDLITE_PS_WORKERS="mpi") as job:
        assert not job.wait_for_all()
    for worker in range(2):
        found = torch.load(site.folder / f"worker{worker}.pt")
        assert same(found["mixed"], found["reduced"])
    untrained = torch_mixed.model().state_dict()
    assert not any(torch.equal(found["mixed"][name], untrained[name]) for name in untrained)


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
    optimizer: torch.optim.Optimizer, named: Any, words: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ps.DistributedOptimizer(optimizer, named, **words)
