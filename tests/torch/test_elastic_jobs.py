"""Training through deaths and growth: weights and samples against numpy, in jobs of threads.

The function that is trained keeps its history in the state, so what was undone is not in it. The
oracle recomputes the weights from that history alone.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.base.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.common.base.host_update import HostUpdateResult
from hvdlite.common.elastic import run_fn
from hvdlite.common.settings.config import Config
from hvdlite.torch.elastic import tensors
from tests.elastic_job import ElasticJob, Worker
from tests.limits import HANG_SECONDS
from tests.ranks import run_ranks

N, FEATURES, BATCH, RATE, MOMENTUM, EPOCHS = 23, 3, 2, 0.05, 0.9, 2
DATA = np.random.default_rng(0).normal(size=(N, FEATURES))
TARGETS = DATA @ np.array([1.0, -2.0, 0.5])
Hook = Callable[["Training", str], None]


class Training:
    """One worker's training; `hook` is called at named places, and may let the worker die."""

    def __init__(self, worker: Worker, hook: Hook, commit_every: int = 1, **options: Any) -> None:
        self.worker, self.hook, self.commit_every = worker, hook, commit_every
        self.model = torch.nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
        # The generator of PyTorch is shared by the workers, which are threads.
        chance = np.random.default_rng(worker.number)
        self.model.weight.data = torch.from_numpy(chance.normal(size=(1, FEATURES)))
        optimizer = torch.optim.SGD(self.model.parameters(), RATE, momentum=MOMENTUM)
        self.optimizer = hvd.DistributedOptimizer(optimizer, self.model.named_parameters())
        self.sampler = hvd.elastic.ElasticSampler(DATA, seed=5)
        training = self

        class State(hvd.elastic.TorchState):
            def save(self) -> None:
                super().save()
                training.at("save")

            def sync(self) -> None:
                training.at("sync begins")
                super().sync()
                training.at("sync ends")

            def check_host_updates(self) -> None:
                training.at("check")
                super().check_host_updates()

        self.entered = 0
        self.state: Any = None
        self.state = State(
            self.model,
            self.optimizer,
            sampler=self.sampler,
            epoch=0,
            history=[],
            start=[],
            **options,
        )
        self.state.start = self.model.weight.detach().numpy().reshape(-1).copy().tolist()
        self.state.register_reset_callbacks([lambda: self.at("on_reset")])

    def at(self, place: str) -> None:
        if self.state is not None:
            self.hook(self, place)

    @property
    def step(self) -> int:
        return len(self.state.history)

    def run(self) -> dict[str, Any]:
        hvd.elastic.run(type(self)._train)(self.state, self)
        return {
            "weights": self.model.weight.detach().numpy().reshape(-1).copy(),
            "history": self.state.history,
            "start": self.state.start,
            "entered": self.entered,
        }

    @staticmethod
    def _train(state: Any, self: Training) -> None:
        self.entered += 1
        while state.epoch < EPOCHS:
            indices = list(self.sampler)
            for first in range(0, len(indices), BATCH):
                self.one_step(indices[first : first + BATCH])
            self.sampler.set_epoch(state.epoch + 1)
            state.epoch += 1
            state.commit()

    def one_step(self, batch: list[int]) -> None:
        self.at("before step")
        self.optimizer.zero_grad()
        outputs = self.model(torch.from_numpy(DATA[batch])).reshape(-1)
        loss = (outputs - torch.from_numpy(TARGETS[batch])).square().mean()
        loss.backward()
        self.at("gradients sent")
        self.optimizer.step()
        self.at("stepped")
        self.sampler.record_batch(0, BATCH)
        # What all ranks used in this step: known without a collective.
        order, size = self.sampler.remaining_indices, self.sampler.num_replicas
        first = self.sampler._recorded - len(batch)
        padded = (order * size)[: self.sampler.total_size]
        everywhere = [padded[r::size][first : first + len(batch)] for r in range(size)]
        self.state.history.append((self.state.epoch, everywhere))
        if self.step % self.commit_every == 0:
            self.state.commit()
        else:
            self.state.check_host_updates()


def check(results: list[Any], size: int | None = None) -> dict[str, Any]:
    """All who are left agree; weights are those of the history; every sample was used once."""
    left = [result for result in results if result is not None]
    assert left and (size is None or len(left) == size)
    for result in left:
        assert np.array_equal(result["weights"], left[0]["weights"])
        assert result["history"] == left[0]["history"]
    weights, velocity = np.array(left[0]["start"]), np.zeros(FEATURES)
    for _, everywhere in left[0]["history"]:
        gradient = np.mean(
            [
                2 * DATA[batch].T @ (DATA[batch] @ weights - TARGETS[batch]) / len(batch)
                for batch in everywhere
            ],
            axis=0,
        )
        velocity = MOMENTUM * velocity + gradient
        weights = weights - RATE * velocity
    np.testing.assert_allclose(left[0]["weights"], weights, rtol=1e-12)
    for epoch in range(EPOCHS):
        used = Counter(
            index
            for number, everywhere in left[0]["history"]
            if number == epoch
            for batch in everywhere
            for index in batch
        )
        assert set(used) == set(range(N))
        assert sum(used.values()) - N < 8  # padding, at most size - 1 in each world
    return left[0]


def no_hook(training: Training, place: str) -> None:
    """Nothing happens."""


PLACES = [
    "before step", "gradients sent", "stepped", "save", "check", "sync begins", "sync ends",
]  # fmt: skip


@pytest.mark.parametrize(
    ("victim", "place", "commit"),
    [
        *((victim, place, "copy") for victim in range(3) for place in PLACES),
        *((number % 3, place, "step") for number, place in enumerate(PLACES)),
    ],
)
def test_survivors_go_on_from_the_last_commit(victim: int, place: str, commit: str) -> None:
    job = ElasticJob(3)

    def hook(training: Training, here: str) -> None:
        late_enough = training.step >= 3 or "sync" in here
        if training.worker.number == victim and here == place and late_enough:
            training.worker.die()

    results = job.run(lambda worker: Training(worker, hook, commit=commit).run())
    assert results[victim] is None
    result = check(results, size=2)
    assert result["entered"] in ((1, 2) if "sync" in place else (2,))
    survivor = job.workers[(victim + 1) % 3]
    assert [world.size for world in survivor.worlds] == [3, 2]
    if "sync" not in place:
        # Nobody who is left lacks anything that another one has, unless ranks saved unequally.
        world = survivor.worlds[-1]
        assert not world.behind or place in ("gradients sent", "stepped", "save", "check")


@pytest.mark.parametrize("commit_every", [1, 3])
def test_two_deaths_and_growth_in_between(commit_every: int) -> None:
    job = ElasticJob(3)

    def hook(training: Training, here: str) -> None:
        number, step = training.worker.number, training.step
        if here == "before step" and (number, step) == (0, 2):
            job.add(main)
            training.worker.die()
        if here == "on_reset" and number == 1 and len(training.worker.worlds) == 3:
            training.worker.die()
        if here == "gradients sent" and (number, step) == (2, 7):
            training.worker.die()

    def main(worker: Worker) -> Any:
        return Training(worker, hook, commit_every).run()

    results = job.run(main)
    assert [result is None for result in results] == [True, True, True, False]
    check(results)


def test_the_weights_are_those_of_an_undisturbed_run_bit_by_bit() -> None:
    """Kills that undo nothing but the step in flight leave no trace in the weights."""

    def kill(training: Training, here: str) -> None:
        if here == "gradients sent" and training.step == 4 and training.worker.number == 3:
            training.worker.die()

    def shrink(training: Training, here: str) -> None:
        # The same worlds, by an interrupt: worker 3 leaves where it would have been killed.
        if here == "before step" and training.step == 4 and training.worker.number == 3:
            training.worker.die()

    killed = check(ElasticJob(4).run(lambda worker: Training(worker, kill).run()))
    shrunken = check(ElasticJob(4).run(lambda worker: Training(worker, shrink).run()))
    assert np.array_equal(killed["weights"], shrunken["weights"])


def test_redone_batches_are_at_most_those_since_the_last_commit() -> None:
    made = dict.fromkeys(range(3), 0)

    def hook(training: Training, here: str) -> None:
        if here == "stepped":
            made[training.worker.number] += 1
        if here == "before step" and training.worker.number == 2 and training.step == 6:
            training.worker.die()

    result = check(ElasticJob(3).run(lambda worker: Training(worker, hook, 4).run()))
    assert made[0] - len(result["history"]) == 6 - 4


def test_no_step_is_lost_or_made_twice_with_commits_by_step() -> None:
    made: Counter[int] = Counter()

    def hook(training: Training, here: str) -> None:
        if here == "stepped":
            made[training.worker.number] += 1
        if here == "gradients sent" and training.worker.number == 1 and training.step == 3:
            training.worker.die()

    def main(worker: Worker) -> Any:
        return Training(worker, hook, commit="step").run()

    result = check(ElasticJob(3).run(main), size=2)
    steps = len(result["history"])
    # A rank whose step had failed received that of the other.
    assert {made[0], made[2]} <= {steps - 1, steps} and max(made[0], made[2]) == steps


def test_an_interrupt_undoes_nothing_and_sends_nothing_where_nobody_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = ElasticJob(2)
    resets: list[int] = []

    def hook(training: Training, here: str) -> None:
        if here == "before step" and training.worker.number == 0 and training.step == 5:
            job.change_hosts(HostUpdateResult.added)
        if here == "on_reset":
            resets.append(training.step)

    monkeypatch.setattr(job, "change_hosts", _once(job.change_hosts))
    result = check(job.run(lambda worker: Training(worker, hook, 4).run()))
    assert result["entered"] == 2
    assert len(resets) == 2 and resets[0] == resets[1] > 5
    assert [world.behind for world in job.workers[1].worlds] == [(1,), ()]


def _once(function: Callable[..., None]) -> Callable[..., None]:
    calls: list[Any] = []

    def call(*arguments: Any) -> None:
        if not calls:
            calls.append(arguments)
            function(*arguments)

    return call


def test_only_newcomers_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    job = ElasticJob(3)
    received: dict[int, list[str]] = {}
    monkeypatch.setattr(
        "hvdlite.torch.elastic.tensors._broadcast_piece",
        _noting(received, job),
    )

    def hook(training: Training, here: str) -> None:
        if here == "before step" and training.worker.number == 0 and training.step == 3:
            received.clear()
            added()

    added = _once(lambda: job.add(main) and None)

    def main(worker: Worker) -> Any:
        return Training(worker, hook).run()

    check(job.run(main), size=4)
    assert set(received) == {0, 3}


def _noting(received: dict[int, list[str]], job: ElasticJob) -> Callable[..., None]:
    original = tensors._broadcast_piece

    def note(piece: Any, name: str, source: Any) -> None:
        received.setdefault(job.here.worker.number, []).append(name)
        original(piece, name, source)

    return note


def test_a_newcomer_that_dies_in_the_sync_harms_nobody() -> None:
    job = ElasticJob(2)

    def hook(training: Training, here: str) -> None:
        if here == "before step" and training.worker.number == 0 and training.step == 3:
            added()
        if here == "sync begins" and training.worker.number == 2:
            training.worker.die()

    added = _once(lambda: job.add(main) and None)

    def main(worker: Worker) -> Any:
        return Training(worker, hook).run()

    result = check(job.run(main), size=2)
    # Nothing is undone: all who are left held the commit.
    assert result["entered"] == 2
    assert job.workers[0].worlds[-1].behind == ()


def test_an_optimizer_that_was_made_alone_reduces_when_ranks_have_come() -> None:
    job = ElasticJob(1)

    def hook(training: Training, here: str) -> None:
        if here == "before step" and training.worker.number == 0 and training.step == 2:
            added()

    added = _once(lambda: job.add(main) and None)

    def main(worker: Worker) -> Any:
        return Training(worker, hook).run()

    check(job.run(main), size=2)
    # What it had committed alone counts: a state of JAX sends arrays that have grown since.
    assert [world.commit for world in job.workers[0].worlds] == [0, 4]


def test_down_to_one_rank_and_up_again() -> None:
    job = ElasticJob(2)

    def hook(training: Training, here: str) -> None:
        if here == "gradients sent" and training.worker.number == 0 and training.step == 2:
            training.worker.die()
        if here == "before step" and training.worker.number == 1 and training.step == 5:
            added()

    added = _once(lambda: job.add(main) and None)

    def main(worker: Worker) -> Any:
        return Training(worker, hook).run()

    check(job.run(main), size=2)
    assert [world.size for world in job.workers[1].worlds] == [2, 1, 2]


def test_shapes_that_ranks_disagree_about_leave_the_loop() -> None:
    def main(worker: Worker) -> int:
        entered = []

        @hvd.elastic.run
        def train(state: Any) -> None:
            entered.append(1)
            hvd.allreduce(torch.ones(hvd.rank() + 1), name="wrong")

        with pytest.raises(HorovodInternalError, match="wrong") as error:
            train(hvd.elastic.TorchState(step=0))
        assert error.value.job_goes_on
        return len(entered)

    assert ElasticJob(3).run(main) == [1, 1, 1]


def test_a_rank_that_departs_is_no_error_of_the_script() -> None:
    """It has shut down in order, so the collective fails, and the job could go on."""

    def main(worker: Worker) -> Any:
        @hvd.elastic.run
        def train(state: Any) -> Any:
            while state.step < 5:
                if worker.number == 1 and state.step == 2:
                    return "left"
                hvd.allreduce(torch.ones(2), name="x")
                state.step += 1
                state.commit()
            return hvd.size()

        return train(hvd.elastic.TorchState(step=0))

    assert ElasticJob(3).run(main) == [2, "left", 2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_other_errors_leave_the_loop(error: type[BaseException]) -> None:
    def main(worker: Worker) -> None:
        @hvd.elastic.run
        def train(state: Any) -> None:
            raise error

        with pytest.raises(error):
            train(hvd.elastic.TorchState(step=0))

    ElasticJob(1).run(main)


def test_ranks_that_differ_after_a_reset_are_named() -> None:
    """HVDLITE_ELASTIC_CHECK: one rank has changed its weights on its own."""

    def main(worker: Worker) -> str:
        model = torch.nn.Linear(2, 1, bias=False)

        @hvd.elastic.run
        def train(state: Any) -> None:
            if worker.number == 2:
                worker.die()
            if worker.number == 1:
                with torch.no_grad():
                    model.weight.add_(1)
            state.save()
            hvd.allreduce(torch.ones(2), name="x")
            raise AssertionError("not reached")

        with pytest.raises(RuntimeError) as error:
            train(hvd.elastic.TorchState(model))
        return str(error.value)

    texts = [text for text in ElasticJob(3, Config(elastic_check=True)).run(main) if text]
    assert len(texts) == 2 and len(set(texts)) == 1
    assert "ranks 0 and 1 differ" in texts[0] and "'model.weight': element [0, 0]" in texts[0]


def test_a_rank_without_the_newest_commit_receives_it_bit_by_bit() -> None:
    """Rank 0 dies between two ranks' saves: the newest commit is the source, not rank 0's."""
    job = ElasticJob(3, Config(elastic_check=True))
    dies = threading.Event()

    def hook(training: Training, here: str) -> None:
        number = training.worker.number
        if here == "check" and training.step == 4 and number == 2 and training.entered == 1:
            dies.set()
            training.worker.die()  # it has saved, and others have not: they wait below
        if here == "stepped" and training.step == 3 and number == 0 and training.entered == 1:
            # Until then worker 2 may still wait for the gradients of which rank 0 has its own.
            assert dies.wait(HANG_SECONDS)
            raise HorovodInternalError("rank 0 sees the death before its save")

    results = job.run(lambda worker: Training(worker, hook).run())
    check(results, size=2)
    world = job.workers[0].worlds[-1]
    assert (world.root, world.behind) == (1, (0,))


def test_an_interrupt_is_caught_in_a_job_without_a_driver() -> None:
    """The law of the queue, with the rank's own broadcast."""

    def main(rank: int) -> list[Any]:
        state = hvd.elastic.TorchState(step=rank)
        seen: list[Any] = []
        state.register_reset_callbacks([lambda: seen.append("reset")])

        def train(state: Any) -> str:
            seen.append(state.step)
            if len(seen) > 3:
                return "done"
            state.step += 1
            if rank == 0:
                state.on_hosts_updated(len(seen), HostUpdateResult.added)
            state.check_host_updates()
            raise AssertionError("all ranks are interrupted")

        assert run_fn(train, lambda: seen.append("joined"))(state) == "done"
        return seen

    assert run_ranks(2, main) == [[0, "joined", "reset", 1]] * 2


def test_skip_sync_says_whether_hosts_were_only_removed() -> None:

    def main(rank: int) -> list[bool]:
        found = []
        for kind in (HostUpdateResult.removed, HostUpdateResult.added, HostUpdateResult.mixed):
            state = hvd.elastic.TorchState()
            if rank == 0:
                state.on_hosts_updated(1, kind)
            with pytest.raises(HostsUpdatedInterrupt) as interrupt:
                state.commit()
            found.append(interrupt.value.skip_sync)
        return found

    assert run_ranks(2, main) == [[True, False, False]] * 2
