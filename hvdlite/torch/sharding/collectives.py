"""The collectives between the local tensors of a sharded part, over groups of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist

# torch 2.13 has new names, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives(Protocol):
    """What the ranks of a mesh exchange; `members` are numbers of ranks in the mesh."""

    rank: int
    ranks: int

    def join(self, members: tuple[int, ...]) -> None:
        """Make ready what exchanges among these ranks need; all of them call it."""

    def allreduce(
        self,
        tensor: torch.Tensor,
        members: tuple[int, ...],
        maximum: bool = False,
        owned: bool = False,
    ) -> torch.Tensor:
        """Return the sum, or the maximum, of the members' tensors.

        `owned`: nobody else has this tensor, which may become the sum.
        """

    def allgather(self, flat: torch.Tensor, members: tuple[int, ...]) -> torch.Tensor:
        """Return the members' tensors in a row."""

    def reducescatter(self, flat: torch.Tensor, members: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's equal part of the sum."""

    def alltoall(
        self,
        flat: torch.Tensor,
        sends: Sequence[int],
        receives: Sequence[int],
        members: tuple[int, ...],
    ) -> torch.Tensor:
        """Send a part to each member, and return what they sent, in a row."""


class MeshCollectives:
    """Collectives among the ranks of a device mesh, or of the job."""

    def __init__(self, mesh: Any = None) -> None:
        of_mesh = list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten()
        self._ranks = [int(each) for each in of_mesh]
        if self._ranks != sorted(self._ranks):
            raise ValueError(
                f"the ranks of a mesh for a sharded part ascend row by row, not {self._ranks}"
            )
        self.rank = self._ranks.index(dist.get_rank())
        self.ranks = len(self._ranks)
        # By members: the default group, and theirs.
        self._groups: dict[tuple[int, ...], tuple[Callable[[], Any], Callable[[], Any]]] = {}

    def join(self, members: tuple[int, ...]) -> None:
        self._group(members)

    def allreduce(
        self,
        tensor: torch.Tensor,
        members: tuple[int, ...],
        maximum: bool = False,
        owned: bool = False,
    ) -> torch.Tensor:
        found = tensor
        if not owned or not tensor.is_contiguous():
            found = tensor.clone(memory_format=torch.contiguous_format)
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        dist.all_reduce(found, op, self._group(members))
        return found

    def allgather(self, flat: torch.Tensor, members: tuple[int, ...]) -> torch.Tensor:
        found = flat.new_empty(flat.numel() * len(members))
        all_gather(found, flat, self._group(members))
        return found

    def reducescatter(self, flat: torch.Tensor, members: tuple[int, ...]) -> torch.Tensor:
        found = flat.new_empty(flat.numel() // len(members))
        reduce_scatter(found, flat, group=self._group(members))
        return found

    def alltoall(
        self,
        flat: torch.Tensor,
        sends: Sequence[int],
        receives: Sequence[int],
        members: tuple[int, ...],
    ) -> torch.Tensor:
        found = flat.new_empty(sum(receives))
        dist.all_to_all_single(found, flat, list(receives), list(sends), self._group(members))
        return found

    def _group(self, members: tuple[int, ...]) -> Any:
        """Return the group of these ranks, all of which call it."""
        world = dist.group.WORLD
        of_world, of_members = self._groups.get(members, (_none, _none))
        found = of_members()
        if found is None or of_world() is not world:
            ranks = tuple(self._ranks[each] for each in members)
            found = world
            if len(ranks) < dist.get_world_size():
                groups = _GROUPS.setdefault(world, WeakValueDictionary())
                found = groups.get(ranks)
                if found is None:
                    found = dist.new_group(list(ranks), use_local_synchronization=True)
                    groups[ranks] = found
            self._groups[members] = ref(world), ref(found)
        return found


def _none() -> None:
    return None


# By the default group, which another one may follow in a process: the groups of ranks. Whoever
# destroys process groups finds nobody here who still holds them.
_GROUPS: WeakKeyDictionary[Any, WeakValueDictionary[tuple[int, ...], Any]] = WeakKeyDictionary()
