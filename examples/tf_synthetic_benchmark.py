"""How many images a second ResNet-50 learns from, on any number of ranks. The images are noise.

    hvdlite-run -np 2 python examples/tf_synthetic_benchmark.py
    hvdlite-run -np 2 python examples/tf_synthetic_benchmark.py --batch-size 4 --image-size 64

The network is written out below: 161 tensors with 25,557,032 parameters in all. The lines marked
"hvdlite:" are all that makes the script distributed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no notes about the CPU

import tensorflow as tf
from tensorflow import keras

import hvdlite.tf as hvd

EXPANSION = 4  # a bottleneck's output channels, in units of its inner ones


def convolution(x: Any, outputs: int, kernel: int, stride: int = 1) -> Any:
    """A convolution without bias and its batch norm."""
    layer = keras.layers.Conv2D(outputs, kernel, stride, padding="same", use_bias=False)
    return keras.layers.BatchNormalization()(layer(x))


def bottleneck(x: Any, inner: int, stride: int) -> Any:
    """Narrow, look around, widen, and add what came in."""
    outputs = EXPANSION * inner
    y = keras.layers.ReLU()(convolution(x, inner, 1))
    y = keras.layers.ReLU()(convolution(y, inner, 3, stride))
    y = convolution(y, outputs, 1)
    same = x.shape[-1] == outputs and stride == 1
    shortcut = x if same else convolution(x, outputs, 1, stride)
    return keras.layers.ReLU()(keras.layers.Add()([y, shortcut]))


def resnet50(image_size: int) -> Any:
    """Images (B, H, W, 3) to the scores of 1000 classes (B, 1000)."""
    images = keras.Input((image_size, image_size, 3))
    x = keras.layers.ReLU()(convolution(images, 64, 7, 2))
    x = keras.layers.MaxPooling2D(3, 2, padding="same")(x)
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            x = bottleneck(x, inner, stride if index == 0 else 1)
    scores = keras.layers.Dense(1000)(keras.layers.GlobalAveragePooling2D()(x))
    return keras.Model(images, scores)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="ResNet-50 on noise.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32, help="images a step, on each rank")
    parser.add_argument("--image-size", type=int, default=224, help="height and width in pixels")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    compression = parser.add_mutually_exclusive_group()
    compression.add_argument("--fp16-allreduce", action="store_true", help="send float16")
    compression.add_argument("--bf16-allreduce", action="store_true", help="send bfloat16")
    return parser.parse_args()


def choose_device(no_cuda: bool) -> str:
    """The kind of device that TensorFlow uses from now on: "GPU" or "CPU"."""
    found = [] if no_cuda else tf.config.list_physical_devices("GPU")
    # hvdlite: each rank of a host takes its own GPU.
    own = found[hvd.local_rank() : hvd.local_rank() + 1]
    for device in own:
        tf.config.experimental.set_memory_growth(device, True)
    tf.config.set_visible_devices(own, "GPU")
    return "GPU" if own else "CPU"


def make_step(model: Any, args: argparse.Namespace) -> Any:
    """A step that combines the gradients of all ranks, and the same start for all."""
    # hvdlite: the sum of N gradients stands for a batch N times as large; Adasum needs no scaling.
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = keras.optimizers.SGD(0.01 * scale)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compression = hvd.Compression.none
    if args.fp16_allreduce:
        compression = hvd.Compression.fp16
    elif args.bf16_allreduce:
        compression = hvd.Compression.bf16
    # hvdlite: start from the same weights everywhere.
    hvd.broadcast_variables([*model.weights, *optimizer.variables], root_rank=0)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        # hvdlite: combine the gradients of all ranks before each step.
        tape = hvd.DistributedGradientTape(
            tape, compression=compression, op=hvd.Adasum if args.use_adasum else hvd.Average
        )
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def say(text: str) -> None:
    if hvd.rank() == 0:  # hvdlite: one rank speaks for all.
        print(text, flush=True)


def main() -> None:
    args = parse_arguments()
    hvd.init()  # hvdlite: who am I, and who else is there?
    kind = choose_device(args.no_cuda)
    model = resnet50(args.image_size)
    step = make_step(model, args)
    images = tf.random.normal((args.batch_size, args.image_size, args.image_size, 3))
    labels = tf.random.uniform((args.batch_size,), maxval=1000, dtype=tf.int64)

    def run(batches: int) -> float:
        """Learn from `batches` batches; returns the seconds that it took."""
        start = time.perf_counter()
        for _ in range(batches):
            step(images, labels)
        tf.test.experimental.sync_devices()
        return time.perf_counter() - start

    say(f"ResNet-50, batch size {args.batch_size}, {hvd.size()} rank(s), {kind}")
    run(args.num_warmup_batches)
    rates = []
    for index in range(args.num_iters):
        seconds = run(args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        say(f"Iter #{index}: {rates[-1]:.1f} img/sec per {kind}")
    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    say(f"Img/sec per {kind}: {mean:.1f} +-{spread:.1f}")
    total = f"{hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}"
    say(f"Total img/sec on {hvd.size()} {kind}(s): {total}")


if __name__ == "__main__":
    main()
