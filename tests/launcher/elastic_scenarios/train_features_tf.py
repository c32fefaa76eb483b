"""A script of the scenarios: a function that TensorFlow has traced once, world after world.

It contains synchronized batch normalization, and gradients that are sent as float16. The history
names the ranks' numbers of each step, from which all data follow.
"""

from __future__ import annotations

import tests.lean  # noqa: F401

# isort: split
import os
import time
from typing import Any

import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.runtime import worlds
from tests.launcher.elastic_scenarios import faults
from tests.launcher.elastic_scenarios.features_tf import RATE, STEPS, batch_of, make_layers

HOLD_STEP, HOLD_SIZE = map(int, os.environ["HOLD"].split())
HOLD_SECONDS = 0.01


class Training:
    """One worker."""

    def __init__(self) -> None:
        self.layers = make_layers(hvd.SyncBatchNormalization)
        self.variables = [weight for layer in self.layers for weight in layer.trainable_weights]
        if faults.NUMBER != 0:  # Others receive the weights of the first one.
            self.variables[0].assign(tf.ones_like(self.variables[0]))
        self.traces = 0
        self.step = tf.function(self._step)

    def _step(self, features: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        self.traces += 1
        with hvd.DistributedGradientTape(
            tf.GradientTape(), compression=hvd.Compression.fp16
        ) as tape:
            outputs = features
            for layer in self.layers:
                outputs = layer(outputs, training=True)
            loss = tf.reduce_mean(tf.square(outputs[:, 0] - targets))
        for variable, gradient in zip(
            self.variables, tape.gradient(loss, self.variables), strict=True
        ):
            variable.assign_sub(RATE * gradient)
        return hvd.size_op(), hvd.rank_op()


@hvd.elastic.run
def train(state: Any, training: Training) -> None:
    """Go on to the last step."""
    world = worlds.current_world()
    assert world is not None
    members = [number for number, _ in world.members]
    faults.say(entered=world.epoch, members=members, rank=hvd.rank())
    while state.step < STEPS:
        while state.step == HOLD_STEP and hvd.size() < HOLD_SIZE:
            time.sleep(HOLD_SECONDS)
            state.check_host_updates()
        faults.at_step(state.step)
        faults.at("before step")
        size, rank = training.step(*batch_of(faults.NUMBER, state.step))
        assert (int(size), int(rank)) == (hvd.size(), hvd.rank())
        state.history = [*state.history, members]
        state.step += 1
        state.commit()
    faults.say(last=int(hvd.join()))


def main() -> None:
    """Train, and say what came of it."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    training = Training()
    everything = [weight for layer in training.layers for weight in layer.weights]
    state = hvd.elastic.TensorFlowState(everything, step=0, history=[])
    train(state, training)
    faults.say(
        result=[variable.numpy().tolist() for variable in everything], history=state.history,
        rank=hvd.rank(), size=hvd.size(), traces=training.traces,
    )  # fmt: skip


if __name__ == "__main__":
    main()
