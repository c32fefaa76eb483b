"""Embeddings whose rows lie on servers, and nowhere else: each batch pulls its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdlite.ps import context
from hvdlite.ps.layouts.blocks import Array, TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.row_store import NORMAL, RowsSpec
from hvdlite.ps.tables.row_table import merge_repeated
from hvdlite.ps.worker.remote_rows import RemoteRows
from hvdlite.torch.ps.arrays import matrix_of, shaped_tensor_of

ROWS = "_hvdlite_rows"  # An attribute of the weight of an embedding.


class PulledRows:
    """The rows of one embedding in a worker: those of the batches since the last step."""

    def __init__(self, spec: RowsSpec) -> None:
        self.spec = spec
        self.table: RemoteRows | None = None
        self._gradients: list[tuple[Array, Tensor]] = []

    def declare(self, name: str, group: int, options: TableOptions) -> RemoteRows:
        """Take part in the table of these rows."""
        shape = self.spec.count, self.spec.length
        spec = TensorSpec(name, self.spec.dtype, shape, group)
        self.table = context.worker().declare_rows(spec, options._replace(rows=self.spec.fields))
        return self.table

    def look_up(self, ids: Tensor, padding: int | None) -> Tensor:
        """Return the rows of ids, of shape (*ids.shape, length); backward keeps their gradients."""
        if self.table is None:
            raise ValueError(
                "the rows of this embedding lie on servers: make ps.DistributedOptimizer with its "
                "parameter before the first batch"
            )
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"ids of rows are {ids.dtype}: give torch.int64 or torch.int32")
        unique, inverse = torch.unique(ids.detach(), return_inverse=True)
        numbers = unique.cpu().numpy().astype(np.int64)
        pulled: Array = self.table.pull(numbers).wait()
        rows = shaped_tensor_of(pulled).to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()

            def keep(tensor: Tensor) -> None:
                assert tensor.grad is not None
                self._gradients.append((numbers, tensor.grad))
                tensor.grad = None

            hooking: Any = rows.register_post_accumulate_grad_hook
            hooking(keep)
        place = None
        if padding is not None and (found := (unique == padding).nonzero()).numel():
            place = int(found[0, 0])  # Its gradient is zero.
        return nn.functional.embedding(inverse, rows, place)

    def forget(self) -> None:
        """Forget the gradients, as ``zero_grad()`` does."""
        self._gradients.clear()

    def take(self, scale: Tensor | None) -> list[Array]:
        """Return the ids and gradients of all rows since the last step, and forget them."""
        taken, self._gradients = self._gradients, []
        if not taken:
            empty = torch.zeros(0, self.spec.length, dtype=getattr(torch, self.spec.dtype))
            return [np.zeros(0, np.int64), matrix_of(empty)]
        gradients = [gradient for _, gradient in taken]
        if scale is not None:
            gradients = [each / scale.to(each.dtype) for each in gradients]
        ids = np.concatenate([ids for ids, _ in taken])
        return merge_repeated(ids, np.concatenate([matrix_of(each) for each in gradients]))


class ServedEmbedding(nn.Embedding):
    """An embedding without rows of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Pull the rows of the batch."""
        rows: PulledRows = getattr(self.weight, ROWS)
        return rows.look_up(input, self.padding_idx)


def serve_rows(
    module: nn.Module | nn.Parameter, seed: int = 0, initializer: str = NORMAL, scale: float = 1.0
) -> None:
    """Let servers make and keep the rows of all embeddings in a module. Raises ValueError."""
    if not isinstance(module, nn.Module):
        raise ValueError(
            "init_in_server=True: give the nn.Embedding instead of its weight: its forward is to "
            "pull rows"
        )
    found = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    if not found:
        raise ValueError(
            f"init_in_server=True: there is no nn.Embedding in {type(module).__name__}, and "
            "servers begin rows of embeddings alone"
        )
    for embedding in found:
        for word in ("max_norm", "scale_grad_by_freq"):
            if getattr(embedding, word):
                raise ValueError(
                    f"init_in_server=True: an embedding with {word} changes rows by what one "
                    f"worker alone sees: leave {word} out"
                )
        _empty(embedding, seed, initializer, scale)


def _empty(embedding: nn.Embedding, seed: int, initializer: str, scale: float) -> None:
    weight = embedding.weight
    dtype = str(weight.dtype).removeprefix("torch.")
    spec = RowsSpec(
        embedding.num_embeddings, embedding.embedding_dim, dtype, seed, initializer, scale,
        embedding.padding_idx,
    )  # fmt: skip
    nothing = torch.empty(0, embedding.embedding_dim, dtype=weight.dtype)
    if weight.device.type == "meta":
        embedding.weight = weight = nn.Parameter(nothing)
    else:
        weight.data = nothing.to(weight.device)
    setattr(weight, ROWS, PulledRows(spec))
    embedding.__class__ = ServedEmbedding
