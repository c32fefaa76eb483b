"""Fusion fills segments with tensors of one kind, up to the threshold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdlite.common.decisions.fusion import next_segments
from hvdlite.common.requests.messages import Response
from tests.common.decisions.requests import request


def response(name: str, length: int, **fields: object) -> Response:
    return Response(request(name, length)._replace(**fields))  # type: ignore[arg-type]


def fused(responses: list[Response], threshold: int, keep_groups: bool = False) -> list[str]:
    segments = next_segments(responses, threshold, keep_groups)
    return ["".join(each.request.name for each in segment) for segment in segments]


def test_fusion_fills_segments_up_to_the_threshold_in_bytes() -> None:
    ready = [response(name, 10) for name in "abcde"]  # 40 bytes each
    assert fused(ready, 0) == ["a", "b", "c", "d", "e"]
    assert fused(ready, 40) == ["a", "b", "c", "d", "e"]
    assert fused(ready, 80) == ["ab", "cd", "e"]
    assert fused(ready, 1000) == ["abcde"]


def test_fusion_looks_past_tensors_of_another_kind() -> None:
    ready = [
        response("a", 10),
        response("b", 10, dtype="float64"),
        response("c", 10),
        response("d", 10, collective="broadcast"),
        response("e", 10, reduce_op=1),
        response("f", 10, prescale_factor=2.0),
        response("g", 10, dtype="float64"),
        response("h", 10)._replace(error="failed"),
        response("i", 10, process_set_id=1),
        response("j", 10, collective="alltoall"),
        response("k", 10, collective="alltoall"),
    ]
    assert fused(ready, 1000) == ["ac", "bg", "d", "e", "f", "h", "i", "j", "k"]


def test_broadcasts_of_one_root_are_fused() -> None:
    roots = {"a": 0, "b": 1, "c": 0, "d": 1, "e": 2}
    ready = [response(n, 10, collective="broadcast", root_rank=r) for n, r in roots.items()]
    assert fused(ready, 1000) == ["ac", "bd", "e"]
    assert fused(ready, 40) == ["a", "b", "c", "d", "e"]


def test_groups_are_fused_with_nothing_else_on_request() -> None:
    ready = [response("a", 1), response("b", 1, group="g"), response("c", 1, group="g")]
    assert fused(ready, 1000) == ["abc"]
    assert fused(ready, 1000, keep_groups=True) == ["a", "bc"]


def test_allgather_counts_the_rows_of_all_ranks() -> None:
    ready = [
        Response(request(n, 1)._replace(collective="allgather"), first_dims=(10, 20)) for n in "abc"
    ]
    assert fused(ready, 240) == ["ab", "c"]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["float32", "int8"]))),
    st.integers(0, 200),
)
def test_fusion_loses_and_repeats_nothing(sizes: list[tuple[int, str]], threshold: int) -> None:
    ready = [response(str(i), n, dtype=dtype) for i, (n, dtype) in enumerate(sizes)]
    segments = next_segments(ready, threshold)
    flat = [each for segment in segments for each in segment]
    assert sorted(flat, key=lambda r: int(r.request.name)) == ready
    for segment in segments:
        assert len({each.request.dtype for each in segment}) == 1
        order = [int(each.request.name) for each in segment]
        assert order == sorted(order)
