"""Gradients made smaller on their way between ranks."""

from __future__ import annotations

from typing import Any


class Compressor:
    """What ``compression=`` takes: override both methods."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what `decompress` needs to know."""
        raise NotImplementedError("a Compressor defines compress and decompress")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor as it was before `compress`, of its dtype."""
        raise NotImplementedError("a Compressor defines compress and decompress")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor itself."""
        return tensor
