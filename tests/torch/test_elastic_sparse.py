"""Sparse gradients and sparse tensors that are in flight when a rank dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hvdlite.torch as hvd
from tests.elastic_job import Worker
from tests.elastic_sparse import (
    COLUMNS,
    KILL_STEP,
    RATE,
    ROWS,
    STEPS,
    History,
    check_training,
    members,
    rows_of,
    total,
)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("begun", [True, False])
def test_sparse_tensors_are_in_flight_when_a_rank_dies(victim: int, begun: bool) -> None:
    """The rank has given its part, or the others wait for it."""

    def main(worker: Worker) -> tuple[Any, History]:
        model = torch.nn.Embedding(ROWS, COLUMNS, sparse=True, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), RATE)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())

        def step_of(state: Any) -> None:
            dies = (worker.number, state.step) == (victim, KILL_STEP)
            if dies and not begun:
                worker.die()
            rows = torch.from_numpy(rows_of(worker.number, state.step))
            optimizer.zero_grad()
            (state.model(rows) - worker.number).square().sum().backward()
            counts = torch.sparse_coo_tensor(
                rows[None], torch.ones(len(rows)), (ROWS,), check_invariants=False
            )
            wait = hvd.sparse_allreduce_async(counts, "counts", hvd.Sum)
            if dies:
                worker.die()
            optimizer.step()
            counted = wait().to_dense().numpy()
            assert np.array_equal(counted, total(members(worker), state.step))

        @hvd.elastic.run
        def train(state: Any) -> None:
            while state.step < STEPS:
                step_of(state)
                state.history = [*state.history, members(worker)]
                state.step += 1
                state.commit()

        state = hvd.elastic.TorchState(model, optimizer, step=0, history=[])
        train(state)
        return model.weight.detach().numpy().copy(), state.history

    check_training(main)
