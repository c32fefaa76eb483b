"""send and recv."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.common.base.errors import UnsupportedError
from hvdlite.torch.process_group import checks
from hvdlite.torch.process_group.arguments import Tensors, as_list
from hvdlite.torch.process_group.base import GroupBase
from hvdlite.torch.process_group.work import CollectiveWork


class Peers(GroupBase):
    """Messages between two ranks of a group."""

    def send(self, tensors: torch.Tensor | Tensors, dst: int, tag: int = 0) -> CollectiveWork:
        """Send tensors to rank `dst` of the group, which calls `recv`."""
        return self._message("send", as_list(tensors), (self._rank, dst, tag), dst)

    def recv(self, tensors: torch.Tensor | Tensors, src: int, tag: int = 0) -> CollectiveWork:
        """Receive tensors of as many elements from rank `src` of the group."""
        return self._message("recv", as_list(tensors), (src, self._rank, tag), src)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> CollectiveWork:
        """Refuse: ranks agree on each message by its sender."""
        raise UnsupportedError(
            "recv: the process group hvdlite cannot receive from any rank: say src="
        )

    def _message(
        self,
        what: str,
        tensors: list[torch.Tensor],
        key: tuple[int, int, int],
        peer: int,
    ) -> CollectiveWork:
        """Start one message for each tensor."""
        checks.readable(what, tensors)
        checks.rank_in(what, peer, self._size)
        if peer == self._rank:
            raise ValueError(f"{what}: rank {peer} of the group is this rank itself: use copy_()")
        caller = self._caller
        sends = what == "send"
        entries = caller.message(key, tensors, caller.members[peer], sends)
        return self._work(entries, tensors, writes=not sends)
