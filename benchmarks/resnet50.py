"""The 161 gradients of ResNet-50: what a step of training has to reduce."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # inner channels, blocks
EXPANSION = 4


def _convolution(inputs: int, outputs: int, kernel: int) -> Iterator[int]:
    """Yield the elements of its weight, and of weight and bias of the normalisation behind it."""
    yield inputs * outputs * kernel**2
    yield from (outputs, outputs)


def _forward() -> Iterator[int]:
    yield from _convolution(3, 64, 7)
    channels = 64
    for inner, blocks in STAGES:
        outputs = EXPANSION * inner
        for block in range(blocks):
            yield from _convolution(channels, inner, 1)
            yield from _convolution(inner, inner, 3)
            yield from _convolution(inner, outputs, 1)
            if block == 0:
                yield from _convolution(channels, outputs, 1)
            channels = outputs
    yield from (channels * 1000, 1000)


# Elements of every tensor, in the order in which backward has them ready: the last layer first.
SIZES = (*_forward(),)[::-1]
assert (len(SIZES), sum(SIZES)) == (161, 25_557_032)


class Gradients:
    """The gradients of one step, or tensors that are `share` times as large."""

    def __init__(self, share: float = 1) -> None:
        import hvdlite.numpy as hvd  # not in the jobs of other libraries, which read `SIZES`

        self._hvd = hvd
        self._tensors = [np.zeros(max(1, int(share * size)), np.float32) for size in SIZES]
        self._handles: list[int] = []

    def enqueue(self) -> None:
        """Start to reduce all of them."""
        self._handles = [
            self._hvd.allreduce_async_(tensor, name=f"gradient.{number}", op=self._hvd.Sum)
            for number, tensor in enumerate(self._tensors)
        ]

    def here(self) -> bool:
        """Return whether the last gradient is reduced."""
        return self._hvd.poll(self._handles[-1])

    def wait(self) -> None:
        """Sleep until all are reduced."""
        for handle in self._handles:
            self._hvd.synchronize(handle)
