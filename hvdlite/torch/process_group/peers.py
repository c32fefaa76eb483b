"""send and recv."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from hvdlite.common.api.options import CallOptions
from hvdlite.common.base.errors import UnsupportedError
from hvdlite.torch.process_group import checks
from hvdlite.torch.process_group.arguments import Tensors, as_list
from hvdlite.torch.process_group.base import GroupBase
from hvdlite.torch.process_group.sets import form
from hvdlite.torch.process_group.work import CollectiveWork


class Peers(GroupBase):
    """Messages between two ranks of a group."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._messages: Counter[tuple[int, int, int]] = Counter()  # By sender, receiver and tag.

    def send(self, tensors: torch.Tensor | Tensors, dst: int, tag: int = 0) -> CollectiveWork:
        """Send tensors to rank `dst` of the group, which calls `recv`."""
        return self._message("send", as_list(tensors), self._rank, dst, tag)

    def recv(self, tensors: torch.Tensor | Tensors, src: int, tag: int = 0) -> CollectiveWork:
        """Receive tensors of the same shapes from rank `src` of the group."""
        return self._message("recv", as_list(tensors), src, self._rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> CollectiveWork:
        """Refuse: ranks agree on each message by its sender."""
        raise UnsupportedError(
            "recv: the process group hvdlite cannot receive from any rank: say src="
        )

    def _message(
        self, what: str, tensors: list[torch.Tensor], src: int, dst: int, tag: int
    ) -> CollectiveWork:
        checks.readable(what, tensors)
        checks.rank_in(what, dst if what == "send" else src, self._size)
        members = self._caller.members
        pair = form(self._caller.runtime, sorted((members[src], members[dst])))
        entries = []
        for tensor in tensors:
            number = self._messages[src, dst, tag]
            self._messages[src, dst, tag] += 1
            name = f"pg.{self._caller.group}.send.{src}.{dst}.{tag}.{number}"
            entries += self._caller.enqueue(
                "broadcast", [tensor], [tensor], CallOptions(pair, root_rank=members[src]), name=name
            )
        return self._work(entries, tensors)
