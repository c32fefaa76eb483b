"""The sizes of ResNet-50's 161 parameters, as a set of gradients that a step has to reduce."""

from __future__ import annotations

from collections.abc import Iterator

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # inner channels, blocks
EXPANSION = 4


def _convolution(inputs: int, outputs: int, kernel: int) -> Iterator[int]:
    """Its weight, and weight and bias of the normalisation that follows."""
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
