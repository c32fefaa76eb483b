"""The interface of compression: tensors are made smaller before they are sent."""

from __future__ import annotations

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
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor itself."""
        return tensor
