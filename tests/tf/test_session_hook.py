"""Ranks of a monitored session begin with the variables of one of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

import hvdlite.tf as hvd
from tests.ranks import run_ranks

v1 = tf.compat.v1


def test_a_monitored_session_trains_as_one_process_would(tmp_path: Path) -> None:
    batches = np.arange(12, dtype=np.float32).reshape(3, 2, 2) / 10

    def train(rank: int, rounds: int, size: int) -> list[float]:
        with tf.Graph().as_default():
            variable = v1.get_variable("weight", initializer=[1.0 + 5 * rank, 2.0])
            x = v1.placeholder(tf.float32, [None, 2])
            optimizer = v1.train.MomentumOptimizer(0.1, 0.5)
            hooks = []
            if size > 1:
                optimizer = hvd.DistributedOptimizer(optimizer)
                hooks = [hvd.BroadcastGlobalVariablesHook(0)]
            step = optimizer.minimize(
                tf.reduce_mean((x * variable) ** 2), v1.train.get_or_create_global_step()
            )
            folder = str(tmp_path / f"of {size}") if rank == 0 else None
            with v1.train.MonitoredTrainingSession(
                checkpoint_dir=folder, hooks=hooks, save_checkpoint_steps=3, save_summaries_steps=0
            ) as session:
                assert session.run(v1.train.get_global_step()) == 3 * rounds
                for batch in batches:
                    session.run(step, {x: batch[rank::size]})
                result: list[float] = session.run(variable).tolist()
            return result

    for rounds in range(2):  # the second time rank 0 goes on from its checkpoint
        expected = train(0, rounds, 1)
        for result in run_ranks(2, lambda rank, rounds=rounds: train(rank, rounds, 2)):
            np.testing.assert_allclose(result, expected, rtol=1e-5)
