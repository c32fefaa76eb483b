"""Many tensors at once: copies that stay allocated, and broadcasts in few flat buffers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.common.elastic.arrays import in_pieces
from hvdlite.common.elastic.source import Source
from hvdlite.common.elastic.state import map_leaves
from hvdlite.common.runtime.basics import rank
from hvdlite.torch import mpi_ops
from hvdlite.torch.device_modules import pins

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
        flat = torch.cat(
            [tensor.reshape(-1).contiguous().view(torch.uint8).to(device) for tensor in piece]
        )
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


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in a tree: its number among the copies."""

    number: int


class Snapshot:
    """A copy in host memory of a tree, such as a state dict; `take` replaces it in place."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._tree: Any = None

    @torch.no_grad()
    def take(self, tree: Any) -> None:
        """Copy the tensors of the tree into the kept buffers, and deep-copy all other leaves."""
        tensors: list[Tensor] = []

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return copy.deepcopy(leaf)
            tensors.append(leaf.detach())
            return _Place(len(tensors) - 1)

        tree = map_leaves(tree, place)
        kept = [*self._copies, *[None] * (len(tensors) - len(self._copies))]
        copies = [_buffer(tensor, old) for old, tensor in zip(kept, tensors, strict=False)]
        plain = [number for number, tensor in enumerate(tensors) if is_plain(tensor)]
        if plain:
            torch._foreach_copy_(
                [copies[number] for number in plain],
                [tensors[number] for number in plain],
                non_blocking=True,
            )
        for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
            torch.get_device_module(device).synchronize(device)
        self._copies, self._tree = copies, tree

    @torch.no_grad()
    def tree(self) -> Any:
        """Return the tree that was taken last, with tensors of its own, in host memory."""
        return map_leaves(
            self._tree,
            lambda leaf: (
                self._copies[leaf.number].clone()
                if isinstance(leaf, _Place)
                else copy.deepcopy(leaf)
            ),
        )


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be a part of a flat buffer."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def _buffer(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """Return host memory for a copy: what was kept, where it fits.

    It is page-locked for a tensor on an accelerator, for speed. One that is not plain is copied.
    """
    if not is_plain(tensor):
        return tensor.cpu().clone()
    if (
        kept is not None
        and kept.shape == tensor.shape
        and kept.dtype == tensor.dtype
        and kept.stride() == tensor.stride()
    ):
        return kept
    return torch.empty_like(tensor, device="cpu", pin_memory=pins(tensor.device.type))
