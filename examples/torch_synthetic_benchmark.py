"""How many images a second ResNet-50 learns from, on any number of ranks. The images are noise.

    hvdlite-run -np 2 python examples/torch_synthetic_benchmark.py
    hvdlite-run -np 2 python examples/torch_synthetic_benchmark.py --batch-size 4 --image-size 64

The network is written out below: 161 tensors with 25,557,032 parameters in all. The lines marked
"hvdlite:" are all that makes the script distributed.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvdlite.torch as hvd

EXPANSION = 4  # a bottleneck's output channels, in units of its inner ones


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias and its batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """Narrow, look around, widen, and add what came in."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * inner
        self.narrow = convolution(inputs, inner, 1)
        self.look = convolution(inner, inner, 3, stride)
        self.widen = convolution(inner, outputs, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.look(functional.relu(self.narrow(x))))
        return functional.relu(self.widen(y) + self.shortcut(x))


class ResNet50(nn.Module):
    """Images (B, 3, H, W) to the scores of 1000 classes (B, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 64, 7, 2)
        blocks: list[nn.Module] = []
        channels = 64
        for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(count):
                blocks.append(Bottleneck(channels, inner, stride if index == 0 else 1))
                channels = EXPANSION * inner
        self.blocks = nn.Sequential(*blocks)
        self.classes = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.stem(x)), 3, 2, padding=1)
        return self.classes(self.blocks(x).mean((2, 3)))


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


def distribute(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """An optimizer whose step combines the gradients of all ranks, and the same start for all."""
    # hvdlite: the sum of N gradients stands for a batch N times as large; Adasum needs no scaling.
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scale)
    compression = hvd.Compression.none
    if args.fp16_allreduce:
        compression = hvd.Compression.fp16
    elif args.bf16_allreduce:
        compression = hvd.Compression.bf16
    # hvdlite: combine the gradients of all ranks before each step.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    # hvdlite: start from the same weights everywhere.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer


def say(text: str) -> None:
    if hvd.rank() == 0:  # hvdlite: one rank speaks for all.
        print(text, flush=True)


def main() -> None:
    args = parse_arguments()
    hvd.init()  # hvdlite: who am I, and who else is there?
    cuda = torch.cuda.is_available() and not args.no_cuda
    # hvdlite: each rank of a host takes its own GPU.
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    model = ResNet50().to(device)
    optimizer = distribute(model, args)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def run(batches: int) -> float:
        """Learn from `batches` batches; returns the seconds that it took."""
        start = time.perf_counter()
        for _ in range(batches):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    kind = "GPU" if cuda else "CPU"
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
