"""Embeddings whose rows lie on servers, and nowhere else: each batch pulls its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hvdlite.ps import context
from hvdlite.ps.layouts.blocks import Array, TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.row_store import NORMAL, RowsSpec
from hvdlite.ps.worker.remote_rows import RemoteRows
from hvdlite.torch.ps.arrays import matrix_of, shaped_tensor_of

ROWS = "_hvdlite_rows"  # An attribute of the weight of an embedding.


class PulledRows:
    """The rows of one embedding in a worker: those of the batches since the last step.

    Their gradients are that of `weight`, which has as many rows meanwhile: so loss scalers find
    them, clipping counts them, and whoever forgets gradients forgets these.
    """

    def __init__(self, spec: RowsSpec, weight: Tensor) -> None:
        self.spec, self._weight = spec, weight
        self.table: RemoteRows | None = None
        self._ids: NDArray[np.int64] = np.zeros(0, np.int64)  # Of the gradient's rows, sorted.

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
        if len(self._ids) and self._weight.grad is None:  # Somebody has forgotten them.
            self.forget()
        unique, inverse = torch.unique(ids.detach(), return_inverse=True)
        numbers = unique.cpu().numpy().astype(np.int64)
        pulled: Array = self.table.pull(numbers).wait()
        rows = shaped_tensor_of(pulled).to(ids.device)
        if torch.is_grad_enabled() and self._weight.requires_grad:
            rows.requires_grad_()

            def keep(tensor: Tensor) -> None:
                assert tensor.grad is not None
                self._add(numbers, tensor.grad.detach())
                tensor.grad = None

            hooking: Any = rows.register_post_accumulate_grad_hook
            hooking(keep)
        place = None
        if padding is not None and (found := (unique == padding).nonzero()).numel():
            place = int(found[0, 0])  # Its gradient is zero.
        return nn.functional.embedding(inverse, rows, place)

    def _add(self, ids: NDArray[np.int64], gradient: Tensor) -> None:
        """Add gradients of rows, of sorted ids, to what is there since the last step."""
        before = self._weight.grad
        if before is not None:
            every = np.union1d(self._ids, ids)
            total = gradient.new_zeros(len(every), self.spec.length)
            for own, rows in ((self._ids, before), (ids, gradient)):
                places = torch.from_numpy(np.searchsorted(every, own)).to(total.device)
                total.index_add_(0, places, rows)
            ids, gradient = every, total
        self._ids, self._weight.grad = ids, None
        self._weight.data = gradient.new_empty(1, 1).expand(gradient.shape)
        self._weight.grad = gradient

    def forget(self) -> None:
        """Forget the gradients, as ``zero_grad()`` does."""
        self._ids, self._weight.grad = self._ids[:0], None
        self._weight.data = self._weight.data.new_empty(0, self.spec.length)

    def take(self, scale: Tensor | None) -> list[Array]:
        """Return the ids and gradients of all rows since the last step, and forget them."""
        ids, gradient = self._ids, self._weight.grad
        self.forget()
        if gradient is None:
            return [self._ids, matrix_of(self._weight.data)]
        if scale is not None:
            gradient = gradient / scale.to(gradient.dtype)
        return [ids, matrix_of(gradient)]


class ServedEmbedding(nn.Embedding):
    """An embedding without rows of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Pull the rows of the batch."""
        rows: PulledRows = getattr(self.weight, ROWS)
        return rows.look_up(input, self.padding_idx)


def _served(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """Return a class that pulls rows where the forward of `kind` has nn.Embedding look them up."""
    if issubclass(kind, ServedEmbedding):
        return kind
    if kind is nn.Embedding:
        return ServedEmbedding
    return type(kind.__name__, (kind, ServedEmbedding), {"__module__": kind.__module__})


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
    made: dict[Tensor, Tensor] = {}
    for embedding in found:
        for word in ("max_norm", "scale_grad_by_freq"):
            if getattr(embedding, word):
                raise ValueError(
                    f"init_in_server=True: an embedding with {word} changes rows by what one "
                    f"worker alone sees: leave {word} out"
                )
        _empty(embedding, made, seed, initializer, scale)


def _empty(
    embedding: nn.Embedding, made: dict[Tensor, Tensor], seed: int, initializer: str, scale: float
) -> None:
    """Leave an embedding without rows. `made` has what became of weights."""
    weight = embedding.weight
    dtype = str(weight.dtype).removeprefix("torch.")
    spec = RowsSpec(
        embedding.num_embeddings, embedding.embedding_dim, dtype, seed, initializer, scale,
        embedding.padding_idx,
    )  # fmt: skip
    if (tied := made.get(weight)) is not None:
        if (first := getattr(tied, ROWS).spec) != spec:
            raise ValueError(
                "init_in_server=True: two embeddings share a weight, whose padding_idx is "
                f"{first.zero_row} in one and {spec.zero_row} in the other: give both the same"
            )
        embedding.weight = tied
    else:
        nothing = torch.empty(0, embedding.embedding_dim, dtype=weight.dtype)
        if weight.device.type == "meta":
            embedding.weight = nn.Parameter(nothing, requires_grad=weight.requires_grad)
        else:
            weight.data = nothing.to(weight.device)
        made[weight] = embedding.weight
        setattr(embedding.weight, ROWS, PulledRows(spec, embedding.weight))
    embedding.__class__ = _served(type(embedding))
