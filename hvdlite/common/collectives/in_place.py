"""Tensors that are reduced in place, for backends in compiled code: addresses instead of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, overload

import numpy as np

from hvdlite.common.collectives.base import Array


class Placed(Protocol):
    """A tensor that lies in contiguous memory of the host if it has an address."""

    @property
    def address(self) -> int | None:
        """Where its memory begins; None where only arrays tell."""

    @property
    def count(self) -> int:
        """The number of its elements, where there is an address."""

    @property
    def input(self) -> Array:
        """The tensor as a flat array."""


class InPlace(Sequence[Array]):
    """The flat arrays of tensors, which are their inputs and outputs.

    An array is made when it is asked for: it takes a microsecond, and as long again to tell its
    address.
    """

    def __init__(
        self, tensors: Sequence[Placed], addresses: list[int], dtype: np.dtype[Any]
    ) -> None:
        self._tensors = tensors
        self.dtype = dtype
        self.addresses = addresses
        self.sizes = [tensor.count for tensor in tensors]

    @classmethod
    def of(cls, tensors: Sequence[Placed], dtype: np.dtype[Any]) -> InPlace | None:
        """Return the arrays of `tensors`, of this dtype, if all of them have addresses."""
        addresses = [tensor.address for tensor in tensors]
        if None in addresses:
            return None
        return cls(tensors, [address for address in addresses if address is not None], dtype)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[Array]:
        return (tensor.input for tensor in self._tensors)

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [tensor.input for tensor in self._tensors[index]]
        return self._tensors[index].input
