"""Equal requests are stored once, and complete when the last rank has come or joined."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.bitsets import mask_of, numbers_of
from hvdlite.common.decisions.request_readiness import RequestReadiness
from tests.common.decisions.requests import request

RANKS = 6
some_ranks = st.frozensets(st.integers(0, RANKS - 1), min_size=1)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=RANKS, max_size=RANKS),
    st.permutations(range(RANKS)),
    some_ranks,
)
def test_requests_that_are_alike_are_held_once(
    made: list[tuple[int, bool]], order: list[int], joined: frozenset[int]
) -> None:
    """`made`: the shape that each rank has; and whether it comes before the joined ones join."""
    readiness = RequestReadiness(mask_of(range(RANKS)))
    requests = [request("t", shape=(rows,)) for rows, _ in made]
    early = [rank for rank in order if made[rank][1]]
    done = [readiness.add(requests[rank], 1 << rank, 0.0) for rank in early]
    done += readiness.excuse(mask_of(joined))
    late = [rank for rank in order if not made[rank][1] and rank not in joined]
    done += [readiness.add(requests[rank], 1 << rank, 1.0) for rank in late]
    done = [alike for alike in done if alike]
    if not early and not late:
        assert not done
        return
    (alike,) = done
    came = [*early, *late]
    assert {rank: r for r, ranks in alike.items() for rank in numbers_of(ranks)} == {
        rank: requests[rank] for rank in came
    }
    assert len(alike) == len({requests[rank] for rank in came})
    assert readiness.oldest is None and "t" not in readiness
