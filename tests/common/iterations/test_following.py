"""Which reductions belong to which iteration, though that is found later."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection

from hvdlite.common.iterations.following import MOST_UNSETTLED, Following
from hvdlite.common.iterations.live import counts_of
from hvdlite.common.iterations.marks import IterationMarks, StepMarks
from hvdlite.common.iterations.rows import IterationTimes
from hvdlite.common.iterations.trace import trace_iterations
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.current import current
from tests.ranks import run_ranks


class Trainer:
    """One whose steps are marked by hand."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def trace_steps(self, steps: StepMarks) -> Callable[[], None]:
        self.steps = steps
        return lambda: None

    def gradient_names(self) -> Collection[str]:
        return self.names

    def call_after_step(self, function: Callable[[], None]) -> None:
        raise NotImplementedError


class Kept(Following):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(current())
        self.found: list[tuple[IterationTimes, list[str]]] = []
        self.others: list[str] = []

    def _put(self, times: IterationTimes, runs: list[SegmentRun]) -> None:
        self.found.append((times, [run.names[0] for run in runs]))

    def _put_run(self, run: SegmentRun, of_iteration: bool) -> None:
        self.others += [] if of_iteration else [run.names[0]]


def run_of(name: str, start: float, end: float) -> SegmentRun:
    return SegmentRun((f"allreduce.{name}",), "allreduce", 4, start, end)


def on_one_rank(main: Callable[[Kept], None]) -> None:
    run_ranks(1, lambda rank: main(Kept()))


def test_reductions_of_two_trainers_and_of_none() -> None:
    def main(kept: Kept) -> None:
        one, two = Trainer("a"), Trainer("b")
        for trainer in (one, two):
            kept.follow(trainer)
            trainer.steps.forward_started()
        for name in ("b", "a", "metric"):
            kept._on_run(run_of(name, 0.0, 1e12))
        assert one.steps.ended() and two.steps.ended()
        assert kept.found == []
        kept.settle()
        assert [names for _, names in kept.found] == [["allreduce.a"], ["allreduce.b"]]
        assert kept.others == ["allreduce.metric"]

    on_one_rank(main)


def test_reductions_of_gradients_that_were_thrown_away_belong_to_no_step() -> None:
    def main(kept: Kept) -> None:
        trainer = Trainer("a")
        kept.follow(trainer)
        kept._on_run(run_of("a", 0.0, 1.0))  # Long before.
        trainer.steps.forward_started()
        kept._on_run(run_of("a", 2.0, 1e12))
        trainer.steps.ended()
        trainer.steps.ended()  # One that nobody saw begin.
        kept.settle()
        assert [names for _, names in kept.found] == [["allreduce.a"]]
        assert not kept._unassigned

    on_one_rank(main)


def test_a_trainer_that_is_gone_has_its_last_steps() -> None:
    def main(kept: Kept) -> None:
        trainer = Trainer("a")
        kept.follow(trainer)
        trainer.steps.forward_started()
        kept._on_run(run_of("a", 0.0, 1e12))
        trainer.steps.ended()
        del trainer
        gc.collect()
        kept.settle()
        assert [names for _, names in kept.found] == [["allreduce.a"]]
        assert not kept._following

    on_one_rank(main)


def test_the_optimizers_own_time_begins_after_a_closure() -> None:
    """Backward and a reduction end within the step; what is reduced after it does not count."""

    def main(kept: Kept) -> None:
        trainer = Trainer("a")
        kept.follow(trainer)
        steps = trainer.steps
        steps.fp_start, steps.bp_end = 0.5, 3.0
        steps._optimizer_start, steps._optimizer_end = 1.0, 7.0
        kept._on_run(run_of("a", 3.0, 5.0))
        kept._on_run(run_of("a", 8.0, 1e12))
        steps.ended()
        kept.settle()
        assert kept.found[0][0].optimizer_time == 2.0

    on_one_rank(main)


def test_a_block_that_is_discarded_inside_has_no_row() -> None:
    def main(kept: Kept) -> None:
        with IterationMarks(kept._enter, kept._exit) as block:
            block.discard()
        with IterationMarks(kept._enter, kept._exit):
            kept._on_run(run_of("x", 1.0, 2.0))
        kept.settle()
        assert len(kept.found) == 1

    on_one_rank(main)


def test_what_nobody_asks_for_does_not_pile_up() -> None:
    def main(rank: int) -> None:
        counts = counts_of(current())
        for _ in range(MOST_UNSETTLED + 5):
            counts._on_run(run_of("a", 1.0, 2.0))
        assert len(counts._seen) == 5
        assert counts.values()["collective_calls_total.allreduce"] == MOST_UNSETTLED + 5
        for _ in range(MOST_UNSETTLED):
            with counts.iteration():
                pass
        assert len(counts._seen) < MOST_UNSETTLED
        assert counts.steps == MOST_UNSETTLED

    run_ranks(1, main)


def test_a_loop_that_goes_on_after_the_end_leaves_nothing() -> None:
    def main(rank: int) -> None:
        trace, trainer = trace_iterations(), Trainer("a")
        with trace.iteration():
            pass
        with trace.iteration():
            trace.stop()
        before = trace.rows()
        for _ in range(3):
            with trace.iteration():
                pass
        trace.follow(trainer)
        assert len(before) == 1 and trace.rows() == before
        assert not trace._seen and not hasattr(trainer, "steps")

    run_ranks(1, main)
