"""The interface of compression: tensors are made smaller before they are sent."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


class Compressor:
    """Base class of the values of ``compression=``. Override both methods."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and a context for `decompress`."""
        raise NotImplementedError("a Compressor defines compress and decompress")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the dtype that it had before `compress`."""
        raise NotImplementedError("a Compressor defines compress and decompress")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


# Compressors with error feedback. These are descriptions; what they remember from step to step is
# in the optimizer: see common/gradients/compressed_bucket.py.


COMPLEX = (
    "compressors with error feedback take no complex gradients: use Compression.none for the "
    "optimizer of these parameters"
)


@dataclass(frozen=True)
class FeedbackCompressor:
    """A compressor that adds to each gradient what it has not sent of the ones before.

    The first `warmup_steps` steps of an optimizer send gradients as they are.
    """

    warmup_steps: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self._check_whole("warmup_steps", self.warmup_steps, 0)

    def _check_whole(self, name: str, value: Any, least: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"{self._name}: {name} must be a whole number from {least} on, not {value!r}"
            )

    def _check_block(self, block: int) -> None:
        self._check_whole("block", block, 8)
        if block % 8:
            raise ValueError(f"{self._name}: block must be a multiple of 8, not {block}")

    @property
    def _name(self) -> str:
        return type(self).__name__.lower()

    def __str__(self) -> str:
        """Return its name and arguments, the same on all ranks that have the same ones."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        if not self.warmup_steps:
            del given["warmup_steps"]
        return f"{self._name}({', '.join(f'{name}={value}' for name, value in given.items())})"

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Raise `ValueError`: only an optimizer has a place for what was not sent."""
        raise ValueError(
            f"Compression.{self} remembers what it has not sent, and has no place for that here: "
            "give it to a DistributedOptimizer (without op=Adasum or shard_state), or use "
            "Compression.fp16 or bf16"
        )

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Raise `ValueError` as `compress` does."""
        return self.compress(tensor)


@dataclass(frozen=True)
class Int8(FeedbackCompressor):
    """Each block of elements as whole numbers of 8 bits, and one scale."""

    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_block(self.block)


@dataclass(frozen=True)
class PowerSGD(FeedbackCompressor):
    """A matrix as a product of two, which have `rank` columns."""

    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("rank", self.rank, 1)


@dataclass(frozen=True)
class TopK(FeedbackCompressor):
    """The elements of the largest magnitudes, a share `ratio` of each tensor."""

    ratio: float

    def __post_init__(self) -> None:
        super().__post_init__()
        ratio = self.ratio
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise ValueError(f"topk: ratio must be greater than 0 and at most 1, not {ratio!r}")
        object.__setattr__(self, "ratio", float(ratio))


@dataclass(frozen=True)
class OneBit(FeedbackCompressor):
    """The signs of elements."""

    block: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_block(self.block)


AnyCompressor = type[Compressor] | FeedbackCompressor


def label_of(compression: AnyCompressor) -> str:
    """Return the compressor in words, the same on all ranks that have the same one."""
    if isinstance(compression, FeedbackCompressor):
        return str(compression)
    cls = compression if isinstance(compression, type) else type(compression)
    return cls.__name__


class FeedbackCompressions:
    """Compressors for slow links: lossy, with error feedback. Optimizers with Average or Sum."""

    @staticmethod
    def int8(block: int = 256) -> Int8:
        """Send blocks of `block` elements as 8 bits each, with a float32 scale for each block.

        A quarter of the bytes of float32, at any number of ranks. Raises `ValueError` unless
        `block` is a positive multiple of 8.
        """
        return Int8(block)

    @staticmethod
    def powersgd(rank: int, warmup_steps: int = 0) -> PowerSGD:
        """Send a matrix of n x m as one of n x `rank` and one of m x `rank` (Vogels et al. 2019).

        A tensor of more dimensions is a matrix of its first one and all others. Those of one
        dimension, and those that this would not make half as large, are sent as they are. The
        second matrix begins each step with that of the last one (warm start). The first
        `warmup_steps` steps of the optimizer send gradients as they are. Raises `ValueError`
        unless `rank` is a positive whole number, and `warmup_steps` one from 0 on.
        """
        return PowerSGD(rank, warmup_steps=warmup_steps)

    @staticmethod
    def topk(ratio: float, warmup_steps: int = 0) -> TopK:
        """Send the elements of the largest magnitudes with their places, 8 bytes for each.

        Of each tensor the share `ratio`, rounded up, whichever they are on each rank; every rank
        receives those of all others. The first `warmup_steps` steps of the optimizer send gradients
        as they are. Raises `ValueError` unless ``0 < ratio <= 1``, and `warmup_steps` is a whole
        number from 0 on.
        """
        return TopK(ratio, warmup_steps=warmup_steps)

    @staticmethod
    def onebit(warmup_steps: int = 100, block: int = 1024) -> OneBit:
        """Send a bit for each element: whether it is negative (1-bit SGD, Seide et al. 2014).

        It stands for the mean of those elements of its block of `block` elements that have its
        sign. The first `warmup_steps` steps of the optimizer send gradients as they are. For SGD,
        also with momentum: Adam's second moment does not survive what signs make of magnitudes.
        Raises `ValueError` unless `warmup_steps` is a whole number from 0 on, and `block` a
        positive multiple of 8.
        """
        return OneBit(block, warmup_steps=warmup_steps)
