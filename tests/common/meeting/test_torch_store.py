"""Meetings in a store of torch: ranks as threads, each with a connection of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.meeting.torch_store import TorchStoreExchange, default_group
from tests.ranks import run_threads

dist = pytest.importorskip("torch.distributed", reason="the extra 'torch' is not installed")

LIMIT = 20.0
# One connection for each rank, which is a thread, to each port: as a process has.
CONNECTIONS = threading.local()


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store that torchrun's agent would serve."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT), False)
    yield store.port


def exchange(port: int, rank: int, size: int, members: Any = None, seconds: float = LIMIT) -> Any:
    store = getattr(CONNECTIONS, str(port), None)
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=LIMIT))
        setattr(CONNECTIONS, str(port), store)
    return TorchStoreExchange(store, rank, size, time.monotonic() + seconds, members, job="7")


def meet(one: Any, rounds: int = 3) -> list[list[bytes]]:
    try:
        return [one.allgather(f"{number} of {one.rank}".encode()) for number in range(rounds)]
    finally:
        one.close()


def expected(size: int, rounds: int = 3) -> list[list[bytes]]:
    return [[f"{number} of {rank}".encode() for rank in range(size)] for number in range(rounds)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_gets_every_body_again_and_again(port: int, size: int) -> None:
    def rank_main(rank: int) -> None:
        for number in range(10):
            rounds = 1 + number % 3
            assert meet(exchange(port, rank, size), rounds) == expected(size, rounds)

    run_threads(size, rank_main)


def test_parts_of_the_ranks_meet_at_the_same_time(port: int) -> None:
    def rank_main(rank: int) -> Any:
        return meet(exchange(port, rank, 4, [3, 1] if rank % 2 else [0, 2]))

    assert run_threads(4, rank_main) == [expected(2)] * 4


def test_a_rank_that_never_comes_is_named_by_the_others(port: int) -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(HorovodInternalError, match=r"did not come: 2"):
            meet(exchange(port, rank, 3, seconds=0.5))

    run_threads(2, rank_main)


def test_who_gave_up_can_come_again(port: int) -> None:
    gave_up = threading.Barrier(3)

    def rank_main(rank: int) -> Any:
        if rank != 1:
            with pytest.raises(HorovodInternalError, match="did not come"):
                meet(exchange(port, rank, 3, seconds=0.3))
        gave_up.wait(LIMIT)
        return meet(exchange(port, rank, 3))

    assert run_threads(3, rank_main) == [expected(3)] * 3


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_in_the_middle_ends_the_wait_of_the_others(
    port: int, leaver: int
) -> None:
    def rank_main(rank: int) -> None:
        one = exchange(port, rank, 3)
        one.allgather(b"")
        if rank == leaver:
            one.close()
            return
        with pytest.raises(HorovodInternalError, match="has left while the ranks"):
            one.allgather(b"")
        one.close()

    began = time.monotonic()
    run_threads(3, rank_main)
    assert time.monotonic() - began < LIMIT / 2


def test_a_store_that_is_lost_is_an_error_that_says_so() -> None:
    class Lost:
        def set(self, key: str, value: bytes) -> None:
            raise RuntimeError("Broken pipe")

        def delete_key(self, key: str) -> None:
            raise RuntimeError("Broken pipe")

    one = TorchStoreExchange(Lost(), 0, 2, time.monotonic() + LIMIT)
    with pytest.raises(HorovodInternalError, match="where the ranks meet, is lost: Broken pipe"):
        one.allgather(b"")


def test_without_a_process_group_there_is_no_default_store() -> None:
    assert default_group() is None
