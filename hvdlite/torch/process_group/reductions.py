"""The methods of a process group that reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.common.api.options import CallOptions
from hvdlite.common.base.errors import UnsupportedError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.torch.process_group import checks
from hvdlite.torch.process_group.arguments import Tensors, as_list, as_lists, op_of, root_of
from hvdlite.torch.process_group.base import GroupBase
from hvdlite.torch.process_group.tensors import flat
from hvdlite.torch.process_group.work import CollectiveWork


class Reductions(GroupBase):
    """allreduce, reduce and reduce_scatter."""

    def allreduce(
        self, tensors: torch.Tensor | Tensors, opts: Any = None, timeout: Any = None
    ) -> CollectiveWork:
        """Reduce each tensor over the group, in place."""
        tensors = as_list(tensors)
        checks.readable("allreduce", tensors)
        options = self._caller.reducing(op_of(opts))
        if any(tensor.layout is torch.sparse_coo for tensor in tensors):
            return self._allreduce_sparse(tensors, options, opts, timeout)
        entries = self._caller.enqueue("allreduce", tensors, tensors, options)
        return self._work(entries, tensors, opts, timeout)

    def _allreduce_sparse(
        self, tensors: list[torch.Tensor], options: CallOptions, opts: Any, timeout: Any
    ) -> CollectiveWork:
        """Gather indices and values of all ranks, whose numbers may differ, and add them up."""
        if options.reduce_op != ReduceOp.SUM or options.prescale_factor != 1:
            raise UnsupportedError(
                "allreduce of sparse tensors only works with ReduceOp.SUM: divide the result, or "
                "give dense tensors (to_dense())"
            )
        if any(tensor.layout is not torch.sparse_coo for tensor in tensors):
            raise ValueError("allreduce: sparse and dense tensors in one call: make two of them")
        gathered = []
        for tensor in tensors:
            local = tensor.detach().coalesce()
            alike = self._caller.plain()._replace(settings=f"a sparse tensor {[*tensor.shape]}")
            # The first has the name of a dense one, so that ranks that disagree are told.
            indices = local.indices().t().contiguous()
            parts = {"allreduce": indices, "allreduce.values": local.values()}
            gathered.append(self._caller.gather(parts, alike))

        def finish() -> None:
            for tensor, parts in zip(tensors, gathered, strict=True):
                indices, values = (part.wait_for_result() for part in parts)
                total = torch.sparse_coo_tensor(
                    indices.t(), values, tensor.shape, check_invariants=False
                )
                with torch.no_grad():
                    tensor.copy_(total.coalesce())

        entries = [entry for parts in gathered for entry in parts]
        return self._work(entries, tensors, opts, timeout, finish)

    # What DDP calls where it knows which rows of an embedding have gradients.
    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> CollectiveWork:
        """Do as `allreduce` does."""
        return self.allreduce(tensors, opts)

    def reduce(
        self,
        tensors: torch.Tensor | Tensors,
        opts: Any = 0,
        op: Any = None,
        timeout: Any = None,
    ) -> CollectiveWork:
        """Reduce each tensor over the group, in place on the root; elsewhere it stays as it is."""
        tensors, root = as_list(tensors), root_of(opts)
        checks.readable("reduce", tensors)
        checks.rank_in("reduce", root, self._size)
        if op is None:
            op = op_of(opts if hasattr(opts, "reduceOp") else None)
        options = self._caller.reducing(op)._replace(root_rank=self._caller.members[root])
        entries = self._caller.enqueue("reduce", tensors, tensors, options)
        return self._work(entries, tensors, opts, timeout, writes=self._rank == root)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> CollectiveWork:
        """Reduce a tensor, and write this rank's part of it to `output`."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, opts: Any = None
    ) -> CollectiveWork:
        """Do as `reduce_scatter_single` does for several tensors."""
        checks.same_number("reduce_scatter_single", outputs, tensors)
        for output, tensor in zip(outputs, tensors, strict=True):
            checks.scattered("reduce_scatter_single", output, tensor, self._size)
        return self._scatter(list(outputs), [flat(tensor) for tensor in tensors], opts)

    def reduce_scatter(
        self,
        outputs: torch.Tensor | Tensors,
        inputs: Sequence[Any],
        opts: Any = None,
        timeout: Any = None,
    ) -> CollectiveWork:
        """Reduce a list of tensors, one for each rank, and write this rank's to `outputs`."""
        lists, outputs = as_lists(inputs, outputs)
        checks.same_number("reduce_scatter", outputs, lists)
        for output, parts in zip(outputs, lists, strict=True):
            checks.one_for_each_rank("reduce_scatter", parts, self._size, "inputs")
            checks.own_part("reduce_scatter", output, parts[self._rank], self._rank)
        packed = [torch.cat([flat(part) for part in parts]) for parts in lists]
        if all(len({part.numel() for part in parts}) == 1 for parts in lists):
            return self._scatter(outputs, packed, opts, timeout)
        return self._reduce_and_cut(outputs, lists, packed, opts, timeout)

    def _scatter(
        self,
        outputs: list[torch.Tensor],
        packed: list[torch.Tensor],
        opts: Any,
        timeout: Any = None,
    ) -> CollectiveWork:
        """Reduce flat tensors, of which each rank keeps an equal part."""
        checks.writable("reduce_scatter", outputs)
        options = self._caller.reducing(op_of(opts))
        targets = [flat(output) for output in outputs]
        entries = self._caller.enqueue("reducescatter", packed, targets, options)
        return self._work(entries, outputs, opts, timeout)

    def _reduce_and_cut(
        self,
        outputs: list[torch.Tensor],
        lists: list[list[torch.Tensor]],
        packed: list[torch.Tensor],
        opts: Any,
        timeout: Any,
    ) -> CollectiveWork:
        """Reduce parts of different sizes as a whole: the engine's reducescatter cuts evenly."""
        checks.readable("reduce_scatter", outputs)
        # The whole has the same size for other cuts, too.
        cuts = [[part.numel() for part in parts] for parts in lists]
        said = f"parts of {cuts[0] if len(cuts) == 1 else cuts} elements"
        options = self._caller.reducing(op_of(opts))._replace(settings=said)
        entries = self._caller.enqueue("allreduce", packed, packed, options, "reducescatter")

        def finish() -> None:
            for output, parts, whole in zip(outputs, lists, packed, strict=True):
                first = sum(each.numel() for each in parts[: self._rank])
                part = whole[first : first + output.numel()]
                output.detach().copy_(part.view(output.shape))

        return self._work(entries, outputs, opts, timeout, finish)

    # The names of the same before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
