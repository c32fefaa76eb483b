"""Models of the compressors with error feedback: all ranks at once, in numpy.

They know each other's gradients, send nothing, and share no code with what they model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pytest

from hvdlite.common.tensors.compression import FeedbackCompressions

Array = np.ndarray[Any, Any]

# Those that every framework tries.
COMPRESSORS = [
    FeedbackCompressions.int8(16),
    FeedbackCompressions.powersgd(2),
    FeedbackCompressions.topk(0.05, warmup_steps=1),
    FeedbackCompressions.onebit(1, block=32),
]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)


class Model(ABC):
    """One tensor over all ranks, which is a bucket of its own; `warmup` steps send all of it."""

    def __init__(self, ranks: int, shape: tuple[int, ...], warmup: int = 0) -> None:
        self.residuals = [np.zeros(shape, np.float32) for _ in range(ranks)]
        self.warmup = warmup

    def step(self, gradients: list[Array]) -> Array:
        """Return the sum of what is sent of the gradients of all ranks."""
        for residual, gradient in zip(self.residuals, gradients, strict=True):
            np.add(residual, gradient, out=residual)
        if self.warmup == 0:
            return self.exchange()
        self.warmup -= 1
        return taken_whole(self.residuals)

    @abstractmethod
    def exchange(self) -> Array:
        """Return the sum, and leave in the residuals what is not sent."""


class PowerSGDModel(Model):
    """Projects matrices on the space that the sum of all spans on the columns of `factor`.

    That space, and hence the result, does not depend on the basis that is chosen.
    """

    def __init__(self, ranks: int, shape: tuple[int, ...], factor: Array, warmup: int) -> None:
        super().__init__(ranks, shape, warmup)
        self.factor = factor.astype(np.float64)

    def exchange(self) -> Array:
        shape = self.residuals[0].shape
        matrices = [each.reshape(shape[0], -1).astype(np.float64) for each in self.residuals]
        left = sum(matrix @ self.factor for matrix in matrices)
        basis, sizes, _ = np.linalg.svd(left, full_matrices=False)
        basis = basis[:, sizes > sizes.max() * 1e-7]
        self.factor = sum(matrices).T @ basis
        for residual, matrix in zip(self.residuals, matrices, strict=True):
            np.subtract(residual, (basis @ (basis.T @ matrix)).reshape(shape), out=residual)
        return (basis @ self.factor.T).reshape(shape)


def taken_whole(residuals: list[Array]) -> Array:
    """Return the sum of all, and leave nothing."""
    total = np.sum(residuals, axis=0)
    for residual in residuals:
        residual[...] = 0
    return total


class WholeModel(Model):
    """A tensor that is not compressed."""

    def exchange(self) -> Array:
        return taken_whole(self.residuals)


class TopKModel(Model):
    """Each rank sends its largest elements, a share `ratio` of them."""

    def __init__(self, ranks: int, shape: tuple[int, ...], ratio: float, warmup: int) -> None:
        super().__init__(ranks, shape, warmup)
        self.ratio = ratio

    def exchange(self) -> Array:
        total = np.zeros(self.residuals[0].shape, np.float64)
        for residual in self.residuals:
            count = int(np.ceil(self.ratio * residual.size))
            least = np.sort(np.abs(residual), axis=None)[-count]
            sent = np.where(np.abs(residual) >= least, residual, 0)
            np.subtract(residual, sent, out=residual)
            total += sent
        return total


class BlockModel(Model):
    """Blocks of the flat tensor are coded; rank r adds up the r-th share of them, and codes it."""

    def __init__(self, ranks: int, shape: tuple[int, ...], block: int, warmup: int = 0) -> None:
        super().__init__(ranks, shape, warmup)
        self.block = block

    def coded(self, values: Array) -> Array:
        """Return what arrives of one block."""
        largest = np.abs(values).max()
        if largest == 0:
            return values
        scale = largest / np.float32(127)
        return np.rint(values / scale) * scale

    def exchange(self) -> Array:
        """Every rank has its part in coding what it sends, and its share of the sum."""
        shape, size = self.residuals[0].shape, self.residuals[0].size
        blocks = [slice(at, min(at + self.block, size)) for at in range(0, size, self.block)]
        result = np.zeros(size, np.float32)
        flat = [residual.reshape(-1) for residual in self.residuals]
        for owner, share in enumerate(np.array_split(np.arange(len(blocks)), len(flat))):
            for place in share:
                where = blocks[place]
                sent = [self.coded(each[where].copy()) for each in flat]
                for each, code in zip(flat, sent, strict=True):
                    each[where] -= code
                total = np.sum(sent, axis=0)
                result[where] = self.coded(total.copy())
                flat[owner][where] += total - result[where]
        return result.reshape(shape)


class SignModel(BlockModel):
    """Each element becomes the mean of those of its sign in the block."""

    def coded(self, values: Array) -> Array:
        result = np.zeros_like(values)
        for chosen in (values < 0, values >= 0):
            if chosen.any():
                result[chosen] = values[chosen].astype(np.float64).mean()
        return result
