"""Which gradients are due, and together with which."""

from __future__ import annotations

import pytest

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.buckets import (
    BucketSchedule,
    Scaling,
    buckets_of,
    check_names,
    check_passes,
    resolve_groups,
    scaling,
    split_evenly,
)


def test_scaling() -> None:
    assert scaling(ReduceOp.SUM, 1.0) == Scaling(ReduceOp.SUM, 1.0, 1.0)
    assert scaling(ReduceOp.AVERAGE, 4.0) == Scaling(ReduceOp.AVERAGE, 0.25, 4.0)
    with pytest.raises(ValueError, match="op != Average"):
        scaling(ReduceOp.SUM, 2.0)
    with pytest.raises(ValueError, match="positive"):
        scaling(ReduceOp.AVERAGE, 0.0)


def test_passes_and_names() -> None:
    assert check_passes(2) == 2
    with pytest.raises(ValueError, match="must be > 0"):
        check_passes(0)
    check_names(["a", "b"])
    with pytest.raises(ValueError, match="duplicates: a, c"):
        check_names(["a", "b", "c", "a", "c"])


def test_groups() -> None:
    assert resolve_groups(0, None) is None
    assert resolve_groups(0, 3) == 3
    with pytest.warns(DeprecationWarning, match="num_groups is deprecated"):
        assert resolve_groups(2, None) == 2
    assert split_evenly([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert split_evenly([1, 2], 5) == [[1], [2]]
    assert buckets_of("abcd", [["c", "a"]]) == [["c", "a"], ["b"], ["d"]]
    for groups in ([["a"], ["a"]], [["a", "a"]]):
        with pytest.raises(ValueError, match="more than once"):
            buckets_of("ab", groups)


def test_a_bucket_is_due_when_all_of_it_is_complete() -> None:
    schedule = BucketSchedule([["a", "b"], ["c"]], passes=1)
    assert schedule.count("b") == ()
    assert schedule.count("c") == ["c"]
    assert schedule.count("a") == ["a", "b"]
    assert schedule.rest("abc") == []
    schedule.reset()
    assert schedule.count("c") == ["c"]
    assert schedule.rest("ba") == [["a", "b"]], "in the order of the bucket, not of the keys"


def test_passes_are_counted_for_each_gradient() -> None:
    schedule = BucketSchedule([["a"], ["b"]], passes=2)
    assert schedule.count("a") == ()
    assert schedule.count("b") == ()
    assert schedule.count("b") == ["b"]
    with pytest.raises(AssertionError, match="Gradients of b were computed more than"):
        schedule.count("b")
    assert schedule.rest("a") == [["a"]], "a step does not wait for passes that did not come"
    schedule.reset(passes=1)
    assert schedule.count("a") == ["a"]


def test_what_takes_no_part_is_left_out_of_its_bucket() -> None:
    schedule = BucketSchedule([["a", "b", "c"]], passes=1)
    assert schedule.rest(["a", "c"]) == [["a", "c"]]
    schedule.reset()
    schedule.add("d")
    assert schedule.count("d") == ["d"]
