"""What a process group hands to the engine: the entries of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdlite.common.api.tensor_entries import NumberedEntry, PreparedCall, TensorEntry
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.requests.entries import Entry, Series
from hvdlite.common.requests.messages import Request
from hvdlite.common.tensors.adapter import Place
from hvdlite.torch.mpi_ops import runner

ADAPTER = runner.adapter


class FittedEntry(TensorEntry[torch.Tensor]):
    """A tensor whose output must fit what other ranks send, which only the run can tell.

    `expected` are the rows that each member shall send. If others come, the collective has run for
    all ranks, and fails on this one afterwards.
    """

    def __init__(
        self,
        request: Request,
        tensor: torch.Tensor,
        target: torch.Tensor,
        splits: tuple[int, ...],
        expected: Sequence[int],
    ) -> None:
        super().__init__(request, ADAPTER, tensor, target, splits)
        self._expected = tuple(expected)

    def wait_for_result(self) -> torch.Tensor:
        """Sleep until the collective has run; return the result, or raise for other rows."""
        try:
            result = super().wait_for_result()
        except HorovodInternalError:
            if self._error:  # There was no room for what came.
                raise self._unexpected() from None
            raise
        if self.rows and self.rows != self._expected:
            raise self._unexpected()
        return result

    def _unexpected(self) -> HorovodInternalError:
        return HorovodInternalError(
            f"{self.request.collective} '{self.request.name}': the outputs of this rank have room "
            f"for {list(self._expected)} elements or rows, by rank of the group, but "
            f"{list(self.rows)} came: give outputs of the sizes that the ranks send",
            job_goes_on=True,
        )


class KnownCall(NamedTuple):
    """A checked call and the series of all like it."""

    call: PreparedCall
    series: Series

    def placed(self, number: int, tensor: torch.Tensor, place: Place) -> Entry:
        """Return the entry of a tensor that is read and written where it is."""
        return NumberedEntry(self.call, self.series, number, ADAPTER, tensor, place)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one row, without copying a contiguous one."""
    return tensor.detach().reshape(-1)


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have memory in common, as a contiguous range."""
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return False
    start, other = first.data_ptr(), second.data_ptr()
    return start < other + second.nbytes and other < start + first.nbytes
