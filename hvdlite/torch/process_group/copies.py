"""The methods of a process group that copy tensors from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.torch.process_group import checks
from hvdlite.torch.process_group.arguments import Tensors, as_list, as_lists, root_of
from hvdlite.torch.process_group.base import GroupBase
from hvdlite.torch.process_group.tensors import flat
from hvdlite.torch.process_group.work import CollectiveWork


class Copies(GroupBase):
    """broadcast, all_gather, all_to_all, gather and scatter."""

    def broadcast(
        self, tensors: torch.Tensor | Tensors, opts: Any = 0, timeout: Any = None
    ) -> CollectiveWork:
        """Copy each tensor of the root to all, in place."""
        tensors, root = as_list(tensors), root_of(opts)
        checks.readable("broadcast", tensors)
        checks.rank_in("broadcast", root, self._size)
        entries = self._caller.enqueue("broadcast", tensors, tensors, self._caller.rooted(root))
        return self._work(entries, tensors, opts, timeout, writes=self._rank != root)

    # -- all_gather

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> CollectiveWork:
        """Gather equal tensors of all ranks into one; `tensor` may be its place in `output`."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, opts: Any = None
    ) -> CollectiveWork:
        """Do as `all_gather_single` does for several tensors."""
        checks.same_number("all_gather_single", outputs, tensors)
        checks.writable("all_gather_single", outputs)
        for output, tensor in zip(outputs, tensors, strict=True):
            checks.gathered("all_gather_single", output, tensor, self._size)
        expected = [[tensor.numel()] * self._size for tensor in tensors]
        entries = self._gather(list(tensors), [flat(output) for output in outputs], expected)
        return self._work(entries, list(outputs), opts)

    def allgather(
        self,
        outputs: Sequence[Any],
        tensors: torch.Tensor | Tensors,
        opts: Any = None,
        timeout: Any = None,
    ) -> CollectiveWork:
        """Gather the tensors of all ranks into a list, whose tensors may differ in size."""
        lists, inputs = as_lists(outputs, tensors)
        checks.same_number("all_gather", lists, inputs)
        for parts, tensor in zip(lists, inputs, strict=True):
            checks.one_for_each_rank("all_gather", parts, self._size, "outputs")
            checks.readable("all_gather", parts)
            checks.own_part("all_gather", parts[self._rank], tensor, self._rank)
        expected = [[part.numel() for part in parts] for parts in lists]
        whole = [
            tensor.new_empty(sum(counts)) for tensor, counts in zip(inputs, expected, strict=True)
        ]
        entries = self._gather(inputs, whole, expected)

        def finish() -> None:
            for parts, buffer in zip(lists, whole, strict=True):
                _cut(buffer, parts)

        every = [part for parts in lists for part in parts]
        return self._work(entries, every, opts, timeout, finish)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], tensors: Tensors, opts: Any = None
    ) -> CollectiveWork:
        """Gather several tensors of all ranks: one list for each rank."""
        checks.one_for_each_rank("all_gather", output_lists, self._size, "lists of outputs")
        lists = [[of_rank[i] for of_rank in output_lists] for i in range(len(tensors))]
        return self.allgather(lists, tensors, opts)

    def _gather(
        self,
        tensors: list[torch.Tensor],
        targets: list[torch.Tensor],
        expected: list[list[int]],
    ) -> list[Any]:
        rows = [flat(tensor) for tensor in tensors]
        options = self._caller.plain()
        return self._caller.enqueue("allgather", rows, targets, options, expected=expected)

    # -- all_to_all

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> CollectiveWork:
        """Send rows of a tensor to each rank, and write the rows that come to `output`."""
        what, ranks = "all_to_all_single", self._size
        given, taken = list(input_splits or ()), list(output_splits or ())
        checks.writable(what, [output])
        checks.rows_of(what, tensor, given, ranks, "input")
        checks.rows_of(what, output, taken, ranks, "output")
        given = given or [_rows(tensor) // ranks] * ranks
        taken = taken or [_rows(output) // ranks] * ranks
        entries = self._exchange(tensor, output, given, taken, "alltoall")
        return self._work(entries, [output], opts, timeout)

    def alltoall(
        self, outputs: Tensors, tensors: Tensors, opts: Any = None, timeout: Any = None
    ) -> CollectiveWork:
        """Send the i-th tensor to rank i, and write what comes from rank i to the i-th output."""
        checks.one_for_each_rank("all_to_all", outputs, self._size, "outputs")
        checks.one_for_each_rank("all_to_all", tensors, self._size, "inputs")
        return self._exchange_lists(list(outputs), list(tensors), opts, timeout, "alltoall")

    def gather(
        self,
        outputs: Sequence[Any],
        tensors: torch.Tensor | Tensors,
        opts: Any = 0,
        timeout: Any = None,
    ) -> CollectiveWork:
        """Copy the tensor of each rank to the root, which gives a list of outputs."""
        root, (tensor,) = root_of(opts), as_list(tensors)
        checks.rank_in("gather", root, self._size)
        nothing = tensor.new_empty(0)
        sent = [tensor if rank == root else nothing for rank in range(self._size)]
        taken = [nothing] * self._size
        if self._rank == root:
            taken = list(outputs if isinstance(tensors, torch.Tensor) else outputs[0])
            checks.one_for_each_rank("gather", taken, self._size, "outputs")
        return self._exchange_lists(taken, sent, opts, timeout, "gather")

    def scatter(
        self,
        outputs: torch.Tensor | Tensors,
        tensors: Sequence[Any],
        opts: Any = 0,
        timeout: Any = None,
    ) -> CollectiveWork:
        """Copy the i-th tensor of the root to rank i."""
        root, (output,) = root_of(opts), as_list(outputs)
        checks.rank_in("scatter", root, self._size)
        nothing = output.new_empty(0)
        taken = [output if rank == root else nothing for rank in range(self._size)]
        sent = [nothing] * self._size
        if self._rank == root:
            sent = list(tensors if isinstance(outputs, torch.Tensor) else tensors[0])
            checks.one_for_each_rank("scatter", sent, self._size, "inputs")
        return self._exchange_lists(taken, sent, opts, timeout, "scatter")

    def _exchange(
        self,
        tensor: torch.Tensor,
        output: torch.Tensor,
        given: list[int],
        taken: list[int],
        kind: str,
    ) -> list[Any]:
        """Send `given` rows to each rank, and expect `taken`."""
        options = self._caller.plain(given)
        tensors, targets = [tensor.detach().contiguous()], [output.detach()]
        return self._caller.enqueue("alltoall", tensors, targets, options, kind, expected=[taken])

    def _exchange_lists(
        self,
        outputs: list[torch.Tensor],
        tensors: list[torch.Tensor],
        opts: Any,
        timeout: Any,
        kind: str,
    ) -> CollectiveWork:
        checks.readable(kind, [*outputs, *tensors])
        checks.own_part(kind, outputs[self._rank], tensors[self._rank], self._rank)
        given, taken = [part.numel() for part in tensors], [part.numel() for part in outputs]
        packed = torch.cat([flat(tensor) for tensor in tensors])
        whole = packed.new_empty(sum(taken))
        entries = self._exchange(packed, whole, given, taken, kind)
        return self._work(entries, outputs, opts, timeout, lambda: _cut(whole, outputs))

    # The names of the same before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def _cut(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    first = 0
    for part in parts:
        last = first + part.numel()
        if part.numel():
            part.detach().copy_(whole[first:last].view(part.shape))
        first = last
