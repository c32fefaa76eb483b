"""Elastic training with Keras' fit, written for Horovod."""

import os
import time

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

EPOCHS, BATCHES, BATCHES_PER_COMMIT, LR = 8, 10, 1, 0.01

hvd.init()
tf.keras.utils.set_random_seed(1 + int(os.environ["HOROVOD_RANK"]))
model = tf.keras.Sequential(
    [tf.keras.Input((4,)), tf.keras.layers.Dense(8, "tanh"), tf.keras.layers.Dense(2)]
)
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(LR * hvd.size()))
model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
samples = np.random.normal(size=(4 * BATCHES, 4)).astype("float32")
labels = np.random.randint(0, 2, 4 * BATCHES)
dataset = tf.data.Dataset.from_tensor_slices((samples, labels)).repeat().batch(4)


class Slow(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.03)


def on_state_reset():
    optimizer.learning_rate.assign(LR * hvd.size())


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
callbacks = [
    Slow(),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state, batches_per_commit=BATCHES_PER_COMMIT),
]


@hvd.elastic.run
def train(state):
    print(f"size {hvd.size()} rank {hvd.rank()} pid {os.getpid()}", flush=True)
    model.fit(
        dataset,
        steps_per_epoch=BATCHES,
        epochs=EPOCHS - state.epoch,
        callbacks=callbacks,
        verbose=0,
    )


train(state)
weights = [variable.numpy().tolist() for variable in model.variables]
steps, lr = int(optimizer.iterations.numpy()), float(optimizer.learning_rate.numpy())
print("result", state.epoch, state.batch, steps, lr / hvd.size() / LR, weights, flush=True)
