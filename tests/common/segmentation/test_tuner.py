"""`auto` against a search through everything, on a simulated machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random

import numpy as np
import pytest

from hvdlite.common.segmentation.cost import (
    MeasuredIteration,
)
from hvdlite.common.segmentation.search import Trials
from hvdlite.common.segmentation.strategies import MOST_SEGMENTS, Size
from hvdlite.common.segmentation.tuner import Decision, Tuner
from tests.common.segmentation.machine import (
    MODELS,
    NETWORKS,
    Machine,
    coarse_resnet,
    machine,
    named,
    obeyed,
    train,
)

FREEZES_WITHIN = 400  # iterations


@cache
def best_tail(model: str, network: str) -> float:
    return machine(model, network).best_tail(4)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("model", MODELS)
def test_the_tail_is_within_five_percent_of_the_best(model: str, network: str) -> None:
    on = machine(model, network)
    tuner = Tuner(on.gradients)
    decisions = train(tuner, on, FREEZES_WITHIN)
    assert decisions[-1].frozen
    assert not any(each.frozen for each in decisions[:-1])
    assert on.tail(tuner.last_indices) <= 1.05 * best_tail(model, network)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("model", MODELS)
def test_the_tail_is_within_ten_percent_of_the_best_on_a_noisy_machine(
    model: str, network: str
) -> None:
    on = machine(model, network, noise=0.03)
    tuner = Tuner(on.gradients)
    decisions = train(tuner, on, FREEZES_WITHIN)
    assert [each.frozen for each in decisions][-1:] == [True]
    # A tail is what is left of two long times: their noise is the measure of what can be seen.
    seen = 0.01 * sum(on.compute)
    assert on.tail(tuner.last_indices) <= 1.1 * best_tail(model, network) + seen


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("compute", "network"), [(0.055, "1 Gbit/s"), (0.01, "10 Gbit/s")])
def test_backward_that_varies_leaves_room_for_late_gradients(
    compute: float, network: str, seed: int
) -> None:
    gradients = coarse_resnet(24)
    on = Machine(gradients, [compute] * 24, *NETWORKS[network], noise=0.1, drift=0.1)
    on.random = Random(seed)
    tuner = frozen(on)
    assert len(tuner.last_indices) <= MOST_SEGMENTS

    def mean_tail(ends: Sequence[int]) -> float:
        on.random = Random(100)
        return float(np.mean([on.run(ends).tail for _ in range(50)]))

    # What is best where nothing varies has no room: its tails are several times as long.
    calm = Machine(gradients, on.compute, *NETWORKS[network])
    tight = frozen(calm).last_indices
    assert mean_tail(tuner.last_indices) < 0.7 * mean_tail(tight)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("model", MODELS)
def test_what_was_tried_teaches_what_to_try_next(model: str, network: str) -> None:
    on = machine(model, network)
    on.knee = sum(each.bytes for each in on.gradients) / 8  # large ones are slower than expected
    tuner = frozen(on)
    assert on.tail(tuner.last_indices) <= 1.05 * on.best_tail(4)


def test_the_first_iteration_of_a_turn_does_not_count() -> None:
    tails = {(9,): [0, 1, 9, 9], (4, 9): [8, 8, 8, 8]}
    trials = Trials(list(tails))
    seen = dict.fromkeys(tails, 0)
    while not trials.finished:
        ends = trials.current
        tail = tails[ends][seen[ends] % 4]
        seen[ends] += 1
        trials.observe(MeasuredIteration((1.0,) * 10, ((1, 1.0, 1.0 + tail),), 1.0, 1.0 + tail))
    assert trials.ranking(len) == [(4, 9), (9,)]


@pytest.mark.parametrize(("noise", "turns"), [(0.0, 3), (0.2, 6)])
def test_what_noise_does_not_let_tell_apart_has_more_turns(noise: float, turns: int) -> None:
    random = Random(2)
    trials = Trials([(9,), (4, 9)])
    seen = 0
    while not trials.finished:
        seen += trials.current == (4, 9)
        tail = (1.0 if trials.current == (9,) else 1.1) * random.gauss(1, noise)
        trials.observe(MeasuredIteration((1.0,) * 10, ((1, 1.0, 1.0 + tail),), 1.0, 1.0 + tail))
    assert seen in range(4 * 3, 4 * turns + 1)
    assert (seen > 4 * 3) == (turns > 3)


def test_the_first_iterations_have_hccls_split_and_one_segment_is_tried() -> None:
    on = machine("ResNet-50", "10 Gbit/s")
    tuner = Tuner(on.gradients)
    assert tuner.decide() is None
    assert tuner.last_indices == Size().last_indices(on.gradients)
    tried = [each.last_indices for each in train(tuner, on, FREEZES_WITHIN)]
    assert (len(on.gradients) - 1,) in tried
    assert tuple(Size().last_indices(on.gradients)) in tried


def test_one_gradient_needs_no_tuning() -> None:
    tuner = Tuner(named([100]))
    assert tuner.decide() == Decision((0,), True)


def test_iterations_with_gradients_missing_do_not_count() -> None:
    on = machine("ResNet-50", "10 Gbit/s")
    tuner = Tuner(on.gradients)
    whole = on.run(tuner.last_indices)
    for _ in range(FREEZES_WITHIN):
        tuner.observe(whole._replace(ready=whole.ready[1:]))
        tuner.observe(whole._replace(ready=(float("inf"), *whole.ready[1:])))
        tuner.observe(whole._replace(segments=()))
    assert tuner.decide() is None


def frozen(on: Machine) -> Tuner:
    tuner = Tuner(on.gradients)
    assert train(tuner, on, FREEZES_WITHIN)[-1].frozen
    return tuner


def test_nothing_changes_where_nothing_changes() -> None:
    on = machine("ResNet-50", "1 Gbit/s", noise=0.05)
    tuner = frozen(on)
    assert train(tuner, on, 2000) == []


@pytest.mark.parametrize("calm", range(0, 20, 3))
def test_one_bad_moment_changes_nothing(calm: int) -> None:
    on = machine("ResNet-50", "1 Gbit/s")
    tuner = frozen(on)
    decisions = train(tuner, on, 40 + calm)
    on.bandwidth /= 10
    decisions += train(tuner, on, 15)
    on.bandwidth *= 10
    assert decisions + train(tuner, on, 200) == []


@pytest.mark.parametrize("factor", [1 / 8, 8])
def test_another_speed_of_the_network_leads_to_other_segments(factor: float) -> None:
    on = machine("ResNet-50", "1 Gbit/s", noise=0.01)
    tuner = frozen(on)
    on.bandwidth *= factor
    decisions = train(tuner, on, FREEZES_WITHIN)
    assert not decisions[0].frozen
    assert decisions[-1].frozen
    on.noise = 0
    assert on.tail(tuner.last_indices) <= 1.1 * on.best_tail(4)


def test_another_speed_of_backward_is_noticed() -> None:
    on = machine("ResNet-50", "10 Gbit/s")
    tuner = frozen(on)
    on.compute = [4 * seconds for seconds in on.compute]
    decisions = train(tuner, on, FREEZES_WITHIN)
    assert decisions[-1].frozen
    assert on.tail(tuner.last_indices) <= 1.05 * on.best_tail(4)


def test_what_is_known_is_used_at_once_and_not_changed() -> None:
    on = machine("ResNet-50", "1 Gbit/s", noise=0.05)
    tuner = Tuner(on.gradients, saved=[3, 23])
    assert tuner.decide() == Decision((3, 23), True)
    assert train(tuner, on, 500) == []
    assert tuner.last_indices == [3, 23]


@pytest.mark.parametrize("known", [[], [3], [5, 3, 23], [-1, 23], [3, 3, 23], [3, 24]])
def test_ends_of_another_model_are_refused(known: list[int]) -> None:
    with pytest.raises(ValueError, match="24 gradients"):
        Tuner(coarse_resnet(24), saved=known)


def test_the_line_says_what_is_in_force() -> None:
    on = machine("transformer", "1 Gbit/s")
    tuner = frozen(on)
    assert obeyed(tuner.call, on.gradients) == tuner.last_indices
