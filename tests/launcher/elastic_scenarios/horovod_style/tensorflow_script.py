"""Elastic training with TensorFlow 2, written for Horovod."""

import os
import time

import horovod.tensorflow as hvd
import tensorflow as tf

EPOCHS, BATCHES, BATCHES_PER_COMMIT, LR = 8, 10, 2, 0.01

hvd.init()
tf.keras.utils.set_random_seed(1 + int(os.environ["HOROVOD_RANK"]))
model = tf.keras.Sequential(
    [tf.keras.Input((4,)), tf.keras.layers.Dense(8, "tanh"), tf.keras.layers.Dense(2)]
)
optimizer = tf.keras.optimizers.SGD(LR * hvd.size(), momentum=0.9)
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_one_batch(data, target, allreduce=True):
    with tf.GradientTape() as tape:
        loss = loss_object(target, model(data, training=True))
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


def get_random_batch():
    return tf.random.normal((4, 4)), tf.random.uniform((4,), maxval=2, dtype=tf.int32)


# All variables exist after this, so that they can be synchronized.
train_one_batch(*get_random_batch(), allreduce=False)


@hvd.elastic.run
def train(state):
    print(f"size {hvd.size()} rank {hvd.rank()} pid {os.getpid()}", flush=True)
    for state.epoch in range(state.epoch, EPOCHS):
        for state.batch in range(state.batch, BATCHES):
            train_one_batch(*get_random_batch())
            state.steps += 1
            time.sleep(0.03)
            if state.batch % BATCHES_PER_COMMIT == 0:
                state.commit()
        state.batch = 0


def on_state_reset():
    optimizer.learning_rate.assign(LR * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0, steps=0)
state.register_reset_callbacks([on_state_reset])
train(state)
weights = [variable.numpy().tolist() for variable in model.variables]
lr = float(optimizer.learning_rate.numpy())
print("result", state.epoch, state.batch, state.steps, lr / hvd.size() / LR, weights, flush=True)
