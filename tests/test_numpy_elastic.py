"""Elastic training with numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.api.objects import broadcast_object
from hvdlite.common.elastic import run as elastic_run
from hvdlite.common.runtime import worlds
from hvdlite.numpy import elastic
from tests.elastic_job import ElasticJob, Worker
from tests.ranks import run_ranks

NumpyState = hvd.elastic.NumpyState


def test_the_vectors_of_a_state() -> None:
    def main(rank: int) -> None:
        weights = np.full(5, float(rank or 0.5))
        layers = {"a": np.full((2, 2), rank, ml_dtypes.bfloat16), "names": ["x", rank]}
        state = NumpyState(weights=weights, layers=layers, step=7 + rank, round=3 + rank)
        state.sync()
        assert state.weights is weights and state.layers is layers
        assert set(weights) == {0.5} and (state.step, state.round) == (7, 3)
        assert (layers["a"] == 0).all() and layers["names"] == ["x", 0]
        weights[:] = 9
        layers["a"] += 1
        layers["names"].append("new")
        state.step, state.round = 8, 4
        state.restore()
        assert set(weights) == {0.5} and (state.step, state.round) == (7, 3)
        assert (layers["a"] == 0).all() and layers["names"] == ["x", 0]
        weights[:], state.step, state.round = 9, 8, 4
        state.commit()
        state.weights = np.zeros(3)  # another shape: replaced
        state.step = 0
        state.restore()
        assert set(state.weights) == {9} and (state.step, state.round) == (8, 4)

    run_ranks(3, main)


@pytest.mark.parametrize(
    "make", [NumpyState, partial(hvd.elastic.ObjectState, broadcast_object, hvd.rank)]
)
def test_the_state_of_another_function_is_refused(make: Any) -> None:
    """A worker that comes when the second of two begins with the first."""

    def main(rank: int) -> None:
        state = make(step=3, log=[1]) if rank else make(step=5, weights=np.ones(2))
        if rank == 0:
            with suppress(hvd.HorovodInternalError):  # The other one has left.
                state.sync()
            return
        with pytest.raises(ValueError, match="log, step on rank 1, and step, weights on the rank"):
            state.sync()

    run_ranks(2, main)


def test_a_sync_that_loses_its_root_halfway_leaves_the_last_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Objects had come, and arrays had not: they are of two commits."""

    def lost(*_: Any) -> None:
        raise hvd.HorovodInternalError("rank 2 is lost", rank=2)

    state = NumpyState(weights=np.full(3, 5.0), step=5)
    monkeypatch.setattr(state, "_bcast_object", lambda saved: {**saved, "step": 6})
    monkeypatch.setattr(elastic, "rank", lambda: 1)
    monkeypatch.setattr(elastic, "broadcast_arrays", lost)
    with pytest.raises(hvd.HorovodInternalError):
        state.sync()
    state.restore()
    assert (state.step, set(state.weights)) == (5, {5.0})


def test_a_sync_that_has_come_counts_whatever_becomes_of_its_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The values are those of the world's commit, and others may need them by its number."""

    @contextmanager
    def lost_at_the_end(_world: Any) -> Iterator[None]:
        yield
        raise hvd.HorovodInternalError("rank 0 is lost", rank=0)

    world = SimpleNamespace(epoch=2, behind=(1, 2), root=0, commit=10)
    monkeypatch.setattr(worlds, "current_world", lambda: world)
    monkeypatch.setattr(elastic_run, "find", lambda: "runtime")
    monkeypatch.setattr(elastic_run, "source_of", lost_at_the_end)
    monkeypatch.setattr(elastic_run, "_settled", {})
    state = NumpyState(step=9)
    state._commit_number = 9
    monkeypatch.setattr(state, "sync", lambda: None)
    loop = elastic_run._Loop(state, lambda _held: None, elastic_run.is_loss, own_reset=False)
    with pytest.raises(hvd.HorovodInternalError):
        loop._sync_in_world()
    assert state._commit_number == 10


def test_a_job_that_loses_and_gains_ranks() -> None:
    job = ElasticJob(3)

    def main(worker: Worker) -> Any:
        @hvd.elastic.run
        def train(state: Any) -> Any:
            while len(state.sizes) < 9:
                step = len(state.sizes)
                if (worker.number, step) == (0, 3):
                    worker.die()
                if (worker.number, step) == (1, 6) and len(job.workers) == 3:
                    job.add(main)
                state.weights -= hvd.allreduce(np.full(4, hvd.rank() + 1.0), op=hvd.Sum, name="g")
                state.sizes.append(hvd.size())
                state.commit()
            return state.weights, state.sizes

        return train(NumpyState(weights=np.full(4, float(worker.number)), sizes=[]))

    results = [result for result in job.run(main) if result is not None]
    assert len(results) == 3
    for weights, sizes in results:
        assert sizes == results[0][1] and set(sizes) == {2, 3}
        assert weights.tolist() == [-sum(n * (n + 1) / 2 for n in sizes)] * 4
