"""The call that makes the same segments again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.segmentation.strategies import split_call
from tests.common.segmentation.machine import named, obeyed
from tests.resnet50 import BACKWARD


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40), st.data())
@settings(max_examples=200)
def test_the_line_makes_the_same_segments_again(sizes: list[int], data: st.DataObject) -> None:
    gradients = named(sizes)
    last = len(sizes) - 1
    cuts = data.draw(st.sets(st.integers(0, last), max_size=7))
    ends = sorted({*cuts, last})
    assert obeyed(split_call(ends, gradients), gradients) == ends


def test_the_line_has_no_more_digits_than_it_needs() -> None:
    assert split_call([160], BACKWARD) == "hvd.set_split_strategy_by_size([100])"
    assert (
        split_call([28, 60, 160], BACKWARD) == "hvd.set_split_strategy_by_size([64.5, 15.2, 20.3])"
    )


def test_gradients_that_no_percentage_tells_apart_are_named_by_index() -> None:
    gradients = named([0, 0, 0, 100])
    assert split_call([1, 3], gradients) == "hvd.set_split_strategy_by_idx([1, 3])"
