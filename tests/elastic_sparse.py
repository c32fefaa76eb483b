"""Training whose gradients are sparse, through the death of a rank; and the same by numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.elastic_job import ElasticJob, Worker

ROWS, COLUMNS, STEPS, RATE = 11, 3, 9, 0.05
KILL_STEP = 4
History = Sequence[Sequence[int]]  # The numbers of the workers that made each step.


def rows_of(number: int, step: int) -> Any:
    """Return the rows that a worker looks up in a step, some of them twice."""
    return np.random.default_rng([number, step]).integers(0, ROWS, 4 + number)


def members(worker: Worker) -> list[int]:
    """Return the numbers of the workers of this world."""
    assert worker.world is not None
    return [number for number, _ in worker.world.members]


def total(numbers: Sequence[int], step: int) -> Any:
    """Return how often each row is looked up in a step."""
    return np.bincount(np.concatenate([rows_of(each, step) for each in numbers]), minlength=ROWS)


def train_alone(history: History) -> Any:
    """Return the weights after these steps: each worker pulls its rows towards its number."""
    weights = np.zeros((ROWS, COLUMNS))
    for step, numbers in enumerate(history):
        gradient = np.zeros_like(weights)
        for number in numbers:
            rows = rows_of(number, step)
            np.add.at(gradient, rows, 2 * (weights[rows] - number))
        weights = weights - RATE * gradient / len(numbers)
    return weights


def check_training(main: Callable[[Worker], tuple[Any, History]]) -> None:
    """Run `main` with 3 workers, one of which dies; compare weights and history of the others."""
    results = [result for result in ElasticJob(3).run(main) if result is not None]
    assert len(results) == 2
    weights, history = results[0]
    assert [len(numbers) for numbers in history] == [3] * KILL_STEP + [2] * (STEPS - KILL_STEP)
    for other_weights, other_history in results:
        assert np.array_equal(weights, other_weights)
        assert history == other_history
    np.testing.assert_allclose(weights, train_alone(history), rtol=1e-12)
