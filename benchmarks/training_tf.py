"""How long whole training steps of TensorFlow and Keras 3 take: hvdlite, and tf.distribute.

    python benchmarks/training_tf.py                            # all networks, on 2 ranks
    python benchmarks/training_tf.py --quick                    # a minute
    python benchmarks/training_tf.py --networks wide --rounds 5

Needs the extra tensorflow. Each entry trains in jobs of its own, which are launched in turns; every
rank has one computing thread. All train the same networks of Keras 3 on the same data:

- "floor": a `tf.function` with a tape and an optimizer of Keras, without exchange, and a barrier;
- "MWMS": the same in ``strategy.run`` of `tf.distribute.MultiWorkerMirroredStrategy`, whose
  optimizer adds up the gradients. `Model.fit` of Keras 3 has no such strategy over several workers;
- "hvdlite tape": the function of "floor" with a `DistributedGradientTape`;
- "hvdlite Keras": that function with a `DistributedOptimizer` of Keras.

Prints a table (the median of the jobs, in brackets the least and the most of them), and writes all
figures to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jobs import Record, add_job_options, addresses, finish, run_jobs
from measuring import HVDLITE_RANKS, Ranks, Way, interleave, launched_rank, make_parser, parse
from training_table import print_training

FLOOR, MWMS, TAPE = "floor", "MWMS", "hvdlite tape"
KERAS = "hvdlite Keras"
ENTRIES = [FLOOR, MWMS, TAPE, KERAS]
WARM_STEPS = 3
Task = tuple[Any, Any, Any]  # a network that gives logits, and the inputs and labels of a batch


def digits() -> Task:
    """Return a small convolutional network: little to compute, little to send."""
    import keras
    from keras import layers

    stack = [layers.Input((8, 8, 1))]
    for channels in (32, 64):
        stack.append(layers.Conv2D(channels, 3, padding="same", activation="relu"))
    stack += [layers.MaxPooling2D(), layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(10)]
    return keras.Sequential(stack), *batch((32, 8, 8, 1), (32,), 10)


def gpt(blocks: int = 4, width: int = 128, context: int = 64, letters: int = 96) -> Task:
    """Return a transformer of the size of torch_gpt.py."""
    import keras
    from keras import layers

    codes = keras.Input((context,), dtype="int32")
    hidden = layers.Embedding(letters, width)(codes)
    for _ in range(blocks):
        normed = layers.LayerNormalization()(hidden)
        attended = layers.MultiHeadAttention(4, width // 4)(normed, normed, use_causal_mask=True)
        hidden = layers.Add()([hidden, attended])
        inner = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(hidden))
        hidden = layers.Add()([hidden, layers.Dense(width)(inner)])
    logits = layers.Dense(letters)(layers.LayerNormalization()(hidden))
    inputs, labels = np.random.randint(letters, size=(2, 16, context)).astype(np.int32)
    return keras.Model(codes, logits), inputs, labels


def resnet50() -> Task:
    """Return the ResNet-50 of Keras, with small images."""
    import keras

    model = keras.applications.ResNet50(
        weights=None, input_shape=(64, 64, 3), classes=1000, classifier_activation=None
    )
    return model, *batch((4, 64, 64, 3), (4,), 1000)


def wide() -> Task:
    """Return a network with much to send (97 MiB) and little to compute."""
    import keras
    from keras import layers

    hidden = [layers.Dense(2048, "relu") for _ in range(6)]
    model = keras.Sequential([layers.Input((2048,)), *hidden, layers.Dense(100)])
    return model, *batch((16, 2048), (16,), 100)


def batch(inputs: Sequence[int], labels: Sequence[int], classes: int) -> tuple[Any, Any]:
    """Return random inputs and labels of these shapes."""
    given = np.random.normal(size=tuple(inputs)).astype(np.float32)
    return given, np.random.randint(classes, size=tuple(labels)).astype(np.int32)


NETWORKS: dict[str, Callable[[], Task]] = {
    "digits": digits,
    "gpt": gpt,
    "resnet50": resnet50,
    "wide": wide,
}


class StrategyRanks:
    """The ranks of a job that `tf.distribute.MultiWorkerMirroredStrategy` connects."""

    def __init__(self, meeting: Path, size: int) -> None:
        """Connect `size` ranks, which tell each other their addresses in files beside `meeting`."""
        self.rank, self.size = launched_rank(), size
        cluster = {"worker": addresses(meeting, self.rank, size)}
        task = {"type": "worker", "index": self.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        import tensorflow as tf

        one_thread(tf)
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()

        @tf.function
        def gathered(values: Any) -> Any:
            own = self.strategy.run(lambda: values[None, :])
            return self.strategy.gather(own, axis=0)

        self._gathered = gathered

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.largest([0.0])

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, element by element."""
        import tensorflow as tf

        found = self._gathered(tf.constant(values, tf.float64)).numpy().max(0)
        return [float(each) for each in found]


def one_thread(tf: Any) -> None:
    """Let TensorFlow compute with one thread."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def make_step(entry: str, task: Task, ranks: Ranks) -> Way:
    """Return a function that makes one step, within the scope of a strategy if there is one."""
    import keras
    import tensorflow as tf

    model, *given = task
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    if entry == KERAS:
        import hvdlite.keras as hvd_keras

        optimizer = hvd_keras.DistributedOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    inputs, labels = map(tf.constant, given)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(labels, model(inputs, training=True)))
            if entry == MWMS:  # its optimizer adds up
                loss /= ranks.size
        if entry == TAPE:
            import hvdlite.tf as hvd

            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    if isinstance(ranks, StrategyRanks):
        strategy = ranks.strategy
        return tf.function(lambda: strategy.run(step))  # type: ignore[no-any-return]
    compiled = tf.function(step)
    if entry != FLOOR:
        return compiled  # type: ignore[no-any-return]

    def floor() -> None:
        compiled()
        ranks.barrier()

    return floor


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank of a job; rank 0 writes the median step of each network."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    (entry,), (size,) = args.entries, args.ranks
    ranks: Ranks = HVDLITE_RANKS
    if entry == MWMS:
        ranks = StrategyRanks(args.rank_file, size)
    else:
        import tensorflow as tf

        import hvdlite.tf as hvd

        one_thread(tf)
        hvd.init()
    records = [measure(entry, network, ranks, args.seconds) for network in args.networks]
    if ranks.rank == 0:
        args.rank_file.write_text(json.dumps(records))
    if entry == MWMS:  # At exit ranks of a strategy complain of those that ended before.
        ranks.barrier()
        sys.stderr.flush()
        os._exit(0)


def measure(entry: str, network: str, ranks: Ranks, seconds: float) -> Record:
    """Return the record of a network: the median step of the slowest rank."""
    import keras

    keras.utils.set_random_seed(1)  # the same network everywhere
    if isinstance(ranks, StrategyRanks):
        with ranks.strategy.scope():
            step, task = build(entry, network, ranks)
    else:
        step, task = build(entry, network, ranks)
    for _ in range(WARM_STEPS):
        step()
    (steps,) = interleave({entry: step}, seconds, ranks).values()
    variables = task[0].trainable_variables
    if entry != FLOOR:
        check_same(entry, variables, ranks)
    nbytes = 4 * sum(int(np.prod(each.shape)) for each in variables)
    case = {"ranks": ranks.size, "network": network, "nbytes": nbytes, "entry": entry}
    return {**case, "seconds": median(steps), "steps": len(steps)}


def build(entry: str, network: str, ranks: Ranks) -> tuple[Way, Task]:
    """Return a step of the network, and what it trains; each rank has its data in another order."""
    model, inputs, labels = NETWORKS[network]()
    order = np.random.default_rng(ranks.rank).permutation(len(inputs))
    task = model, inputs[order], labels
    return make_step(entry, task, ranks), task


def check_same(entry: str, variables: Sequence[Any], ranks: Ranks) -> None:
    """Raise `ArithmeticError` when ranks that train together have come apart."""
    for variable in variables:
        mine = np.asarray(variable).reshape(-1)[:16].astype(np.float64)
        if ranks.largest(mine.tolist()) != [-each for each in ranks.largest((-mine).tolist())]:
            raise ArithmeticError(f"{entry}: {variable.path} is not the same on all ranks")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("How long training steps of TensorFlow take.", "training_tf", [2])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=ENTRIES, metavar="ENTRY")
    parser.add_argument("--seconds", type=float, default=3, help="of a job, for each network")
    add_job_options(parser)
    return parse(parser, "small networks, one job of each", networks=["digits", "wide"], rounds=1,
                 seconds=0.5)  # fmt: skip


def main() -> None:
    args = parse_arguments()
    if args.rank_file:
        rank_main(args)
        return
    records, left_out = run_jobs(__file__, args, sys.argv[1:])
    print_training(records, args.entries, FLOOR, MWMS, TAPE, KERAS)
    finish(args.json, records, left_out)


if __name__ == "__main__":
    main()
