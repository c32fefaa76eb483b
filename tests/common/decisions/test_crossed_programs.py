"""Collectives of programs that cross each other: found where they never end, and nowhere else."""

from __future__ import annotations

import random

import pytest

from hvdlite.common.base.bitsets import mask_of
from hvdlite.common.decisions.crossed_programs import crossed
from hvdlite.common.requests.messages import Request

Waiting = dict[str, tuple[int, ...]]  # The missing ranks by what waits.
TABLE: dict[str, tuple[Waiting, set[str]]] = {
    "fewer": ({"p2": (1,), "p1": (0,)}, {"p1", "p2"}),
    "a late rank": ({"p1": (1,), "p2": (1,)}, set()),
    "one behind another": ({"p1": (2,), "p2": (1, 2), "p3": (0, 1, 2)}, set()),
    "others beside them": ({"p1": (0,), "p2": (1, 2), "p3": (0, 1, 2)}, {"p1", "p2"}),
    "with a name": ({"p1": (0,), "mine": (1,)}, set()),
    "too young": ({"p1": (0,), "p2 young": (1,)}, set()),
}


def waiting(missing: Waiting) -> list[tuple[Request, int, float]]:
    return [
        (
            Request(0, name, "allreduce", settings="program step" * name.startswith("p")),
            mask_of(ranks),
            4.0 * name.endswith("young"),
        )
        for name, ranks in missing.items()
    ]


@pytest.mark.parametrize("case", TABLE)
def test_what_crosses(case: str) -> None:
    missing, wanted = TABLE[case]
    found = crossed(waiting(missing), 3.0)
    assert {request.name for request, _ in found} == wanted


def test_the_error_names_both_ranks_and_both_places() -> None:
    found = crossed(waiting({"p2": (1,), "p1": (0,)}), 3.0)
    for _, error in found:
        assert "rank 0 waits in allreduce 'p2' of program step" in error
        assert "rank 1 in allreduce 'p1' of program step" in error


def test_ranks_of_one_order_never_cross() -> None:
    """Each has come some way through the same sequence."""
    draw = random.Random(1)
    for _ in range(200):
        done = [draw.randint(0, 6) for _ in range(5)]
        missing = {
            f"p{place}": tuple(rank for rank, count in enumerate(done) if count <= place)
            for place in range(6)
        }
        begun = {name: ranks for name, ranks in missing.items() if 0 < len(ranks) < 5}
        assert not crossed(waiting(begun), 3.0)
