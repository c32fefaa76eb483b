"""Meetings in a key-value store of torch.distributed: of torchrun's agent, or of a process group.

The first of the members gathers: every other rank writes its body under a key of its own, and waits
for the answer to just that attempt, so that what an earlier attempt has left behind does no harm.
torch is imported only where a job has been started with it.

    NAME/RANK               token of the attempt, number of the round, body      by each rank
    NAME/answer/TOKEN/ROUND all bodies                                           by the first member
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import msgpack

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.address import Address
from hvdlite.common.meeting.launch import WorldRank
from hvdlite.common.meeting.start_wait import Presence, StartWait

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.001, 0.05
TOKEN_BYTES = 16
# In the place of the number of a round: the rank has left the meeting, or has given up to wait for
# its first round. A key is not deleted, since a read of a key that is not there waits for it.
LEFT, GAVE_UP = -1, -2

Store: TypeAlias = Any  # A torch.distributed.Store; torch has no types for it everywhere.
Result = TypeVar("Result")

# By the name of a meeting: the attempts that met in the last one that this process has gathered.
_met: dict[str, set[bytes]] = {}
_agent_stores: dict[Address, Store] = {}


# The store by which a process group is being made, and this process's place in it.
_offer: tuple[Store, WorldRank] | None = None


@contextmanager
def offered(store: Store, rank: int, size: int) -> Iterator[None]:
    """Let `init` meet in this store within the context: a process group is being made by it."""
    global _offer  # noqa: PLW0603 - init has no argument for it
    _offer = store, WorldRank(rank, size)
    try:
        yield
    finally:
        _offer = None


def default_group() -> WorldRank | None:
    """Return this process's place in the default group of torch.distributed; None without one.

    Does not import torch.
    """
    if _offer is not None:
        return _offer[1]
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return WorldRank(distributed.get_rank(), distributed.get_world_size())


def default_store() -> Store:
    """Return the store by which the ranks of the default group of torch.distributed have met."""
    if _offer is not None:
        return _offer[0]
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def agent_store(address: Address, deadline: float) -> Store:
    """Return the store of torchrun's agent. Raises `HorovodInternalError` when it is not there.

    Every `init` of this process uses one connection: a new one takes seconds now and then.
    """
    if address in _agent_stores:
        return _agent_stores[address]
    from datetime import timedelta

    import torch.distributed

    store: Store = getattr(torch.distributed, "TCPStore")  # noqa: B009 - it has no type
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        _agent_stores[address] = store(address.host, address.port, None, False, timeout)
    except (RuntimeError, ValueError) as error:
        raise HorovodInternalError(
            f"the store of torchrun's agent at {address} (MASTER_ADDR, MASTER_PORT) cannot be "
            f"reached: {error}"
        ) from error
    return _agent_stores[address]


class TorchStoreExchange:
    """The exchange of world rank `rank` of `size` in a store; see `Exchange`.

    `members` are the world ranks that meet, in the order of their new numbers; None is all of them.
    `job` tells the restarts of a job apart that use one store. `deadline` is in monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        deadline: float,
        members: Sequence[int] | None = None,
        *,
        job: str = "",
    ) -> None:
        self._members = list(range(size)) if members is None else list(members)
        self.rank, self.size = self._members.index(rank), len(self._members)
        self._world_rank = rank
        self._store = store
        self._wait = StartWait(rank, size, deadline)
        spelled = "all" if members is None else "-".join(map(str, members))
        self._name = f"hvdlite/{job}/{spelled}"
        self._token = os.urandom(TOKEN_BYTES)
        # The tokens of all members, which the first of them learns in round 0.
        self._tokens: dict[int, bytes] = {}
        self._round = 0

    def allgather(self, body: bytes) -> list[bytes]:
        self._write(self._round, bytes(body))
        try:
            bodies = self._gather() if self.rank == 0 else self._await_answer()
        except BaseException:
            with suppress(HorovodInternalError):
                self._write(LEFT if self._round else GAVE_UP)
            raise
        self._round += 1
        return bodies

    def close(self) -> None:
        if self._round:
            with suppress(HorovodInternalError):
                self._write(LEFT)

    def _gather(self) -> list[bytes]:
        """Return the bodies of all members, and give them to the others."""
        bodies: dict[int, bytes] = {}
        pause = FIRST_PAUSE_SECONDS
        while True:
            complete = self._add_missing(bodies)
            if complete and self._round == 0:
                # Those who came first may have given up or begun anew since: look again.
                bodies.clear()
                complete = self._add_missing(bodies)
            if complete:
                break
            pause = self._pause(pause)
        if self._round == 0:
            _met[self._name] = set(self._tokens.values())
        answer = msgpack.packb([bodies[rank] for rank in self._members])
        for rank in self._members[1:]:
            self._call(self._store.set, self._answer_key(self._tokens[rank]), answer)
        return [bodies[rank] for rank in self._members]

    def _add_missing(self, bodies: dict[int, bytes]) -> bool:
        """Add the bodies that are there to `bodies`; return whether these are all."""
        for rank in self._members:
            if rank not in bodies and (body := self._body_of(rank)) is not None:
                bodies[rank] = body
        return len(bodies) == self.size

    def _body_of(self, rank: int) -> bytes | None:
        """Return what `rank` has given to this round, or None while it has not.

        Raises `HorovodInternalError` when it has left or begun anew.
        """
        token, number, body = self._read(rank)
        if self._round == 0:
            if number or token in _met.get(self._name, ()):
                return None  # The rank has not left the meeting before this one yet.
            self._tokens[rank] = token
        elif number == LEFT or self._tokens[rank] != token:
            raise _has_left(rank)
        return body if number == self._round else None

    def _await_answer(self) -> list[bytes]:
        key, first = self._answer_key(self._token), self._members[0]
        pause = FIRST_PAUSE_SECONDS
        while not self._call(self._store.check, [key]):
            has_left = self._round and self._read(first)[1] == LEFT
            if has_left and not self._call(self._store.check, [key]):
                raise _has_left(first)
            pause = self._pause(pause)
        answer: list[bytes] = msgpack.unpackb(self._call(self._store.get, key))
        with suppress(RuntimeError):  # Not every store can delete, and nobody else reads the key.
            self._store.delete_key(key)
        return answer

    def _pause(self, seconds: float) -> float:
        """Sleep, and return how long to sleep the next time; say who is missing when it is time."""
        wait = self._wait
        if wait.over or wait.line_is_due():
            presence = Presence([], [], [], [], [])
            for rank in self._members:
                number = self._read(rank)[1]
                kinds = {LEFT: presence.missing, GAVE_UP: presence.left}
                kinds.get(number, presence.waiting).append(rank)
            wait.tell(presence)
        time.sleep(min(seconds, wait.seconds()))
        return min(2 * seconds, LONGEST_PAUSE_SECONDS)

    def _write(self, number: int, body: bytes = b"") -> None:
        """Replace what this rank has written before: the number of its round, or LEFT."""
        value = msgpack.packb([self._token, number, body])
        self._call(self._store.set, self._body_key(self._world_rank), value)

    def _read(self, rank: int) -> tuple[bytes, int, bytes]:
        """Return the token, the number of the round and the body that `rank` has written last."""
        key = self._body_key(rank)
        if not self._call(self._store.check, [key]):
            return b"", LEFT, b""
        token, number, body = msgpack.unpackb(self._call(self._store.get, key))
        return token, number, body

    def _body_key(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def _answer_key(self, token: bytes) -> str:
        return f"{self._name}/answer/{token.hex()}/{self._round}"

    def _call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise HorovodInternalError(
                f"the store of torch.distributed, where the ranks meet, is lost: {error}"
            ) from error


def _has_left(rank: int) -> HorovodInternalError:
    return HorovodInternalError(f"rank {rank} has left while the ranks of this job connected", rank)
