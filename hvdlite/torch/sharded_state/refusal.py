"""What keeps PyTorch's distributed checkpoints (DCP) from the shards of one rank."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

KEY = "shard"


class ShardOfOneRank(str):
    """A note beside the state of a shard, which DCP cannot write; all else takes it for a text.

    DCP takes tensors of one name for copies, and writes those of one rank: the shards of all others
    would be lost. It asks whatever has these methods how to write it.
    """

    __slots__ = ()

    def __create_write_items__(self, fqn: str, value: Any) -> NoReturn:
        raise ValueError(
            f"{fqn!r} is of the state_dict() of an optimizer with shard_state=True, of which each "
            "rank has another part, and torch.distributed.checkpoint would write that of one rank "
            "alone: call hvd.checkpoint.save(directory, {..., 'optimizer': optimizer}), or give "
            "optimizer.consolidate()"
        )

    def __create_chunk_list__(self) -> NoReturn:
        self.__create_write_items__(KEY, self)

    def __get_tensor_shard__(self, index: Any) -> NoReturn:
        self.__create_write_items__(KEY, self)

    def __deepcopy__(self, memo: Any) -> ShardOfOneRank:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[()]]:
        # torch.load(weights_only=True), the default, knows no class of ours.
        return OrderedDict, ()


def noted(state: dict[str, Any], position: int, members: int) -> dict[str, Any]:
    """Return the state of a shard with a note beside it."""
    return {**state, KEY: ShardOfOneRank(f"of rank {position} of {members}")}


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a shard without the note."""
    return {name: value for name, value in state.items() if name != KEY}
