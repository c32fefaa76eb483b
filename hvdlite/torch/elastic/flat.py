"""Broadcasts of many tensors in few flat buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.common.elastic.arrays import in_pieces
from hvdlite.common.elastic.source import Source
from hvdlite.common.runtime.basics import rank
from hvdlite.torch import mpi_ops

Tensor = torch.Tensor


@torch.no_grad()
def broadcast_flat(tensors: Sequence[Tensor], name: str, source: Source) -> None:
    """Copy the tensors of the root into those of the other ranks of the sync; blocks.

    Every rank gives tensors of the same shapes and dtypes in the same order; one buffer for each
    dtype is sent, in pieces. Raises `HorovodInternalError`.
    """
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.detach())
    for dtype, group in groups.items():
        for number, piece in enumerate(in_pieces(group)):
            _broadcast_piece(piece, f"{name}.{str(dtype).removeprefix('torch.')}.{number}", source)


def _broadcast_piece(piece: Sequence[Tensor], name: str, source: Source) -> None:
    device = piece[0].device
    is_root = rank() == source.root_rank
    if is_root:
        flat = torch.cat([_bytes_of(tensor).to(device) for tensor in piece])
    else:
        flat = torch.empty(sum(t.nbytes for t in piece), dtype=torch.uint8, device=device)
    mpi_ops.broadcast_(flat, source.root_rank, name, source.process_set)
    if is_root:
        return
    parts = torch.split(flat, [tensor.nbytes for tensor in piece])
    for tensor, received in zip(piece, parts, strict=True):
        # A part of the buffer may begin where the dtype must not; its copy does not.
        values = received.clone().view(tensor.dtype) if tensor.nbytes else tensor
        tensor.copy_(values.reshape(tensor.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
