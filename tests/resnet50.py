"""The parameters of ResNet-50 in the order of their definition: names and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hvdlite.common.segmentation.strategies import Gradient

Parameter = tuple[str, tuple[int, ...]]


def _convolution(
    conv: str, norm: str, inputs: int, outputs: int, kernel: int
) -> Iterator[Parameter]:
    yield f"{conv}.weight", (outputs, inputs, kernel, kernel)
    yield f"{norm}.weight", (outputs,)
    yield f"{norm}.bias", (outputs,)


def _parameters() -> Iterator[Parameter]:
    yield from _convolution("conv1", "bn1", 3, 64, 7)
    inputs = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            path = f"layer{stage}.{block}"
            yield from _convolution(f"{path}.conv1", f"{path}.bn1", inputs, width, 1)
            yield from _convolution(f"{path}.conv2", f"{path}.bn2", width, width, 3)
            yield from _convolution(f"{path}.conv3", f"{path}.bn3", width, 4 * width, 1)
            if block == 0:
                down = f"{path}.downsample"
                yield from _convolution(f"{down}.0", f"{down}.1", inputs, 4 * width, 1)
            inputs = 4 * width
    yield "fc.weight", (1000, 2048)
    yield "fc.bias", (1000,)


PARAMETERS = tuple(_parameters())
FORWARD = tuple(Gradient(name, 4 * math.prod(shape), "float32") for name, shape in PARAMETERS)
BACKWARD = FORWARD[::-1]
