"""Python objects between ranks."""

from __future__ import annotations

from hvdlite.common.api.objects import allgather_object, broadcast_object
from tests.ranks import run_ranks


def test_objects_of_any_size_and_kind() -> None:
    def main(rank: int) -> None:
        mine = {"rank": rank, "call": lambda: rank, "body": b"x" * (1000 * rank)}
        gathered = allgather_object(mine)
        assert [each["rank"] for each in gathered] == [0, 1, 2]
        assert [each["call"]() for each in gathered] == [0, 1, 2]
        assert [len(each["body"]) for each in gathered] == [0, 1000, 2000]
        received = broadcast_object(mine, root_rank=2)
        assert received["call"]() == 2
        assert (received is mine) == (rank == 2)

    run_ranks(3, main)
