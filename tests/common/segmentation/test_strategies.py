"""Strategies that cut gradients into segments: published vectors, one law, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.segmentation.parsing import (
    by_index,
    by_megabytes,
    by_size,
    read_strategy,
    resolve,
)
from hvdlite.common.segmentation.strategies import (
    MIB,
    Auto,
    Count,
    Gradient,
    Index,
    Megabytes,
    Size,
    Strategy,
    Threshold,
    segments_of,
    split_call,
)
from tests.common.segmentation.machine import named, obeyed
from tests.resnet50 import BACKWARD, FORWARD


def counts(strategy: Strategy, gradients: tuple[Gradient, ...]) -> list[int]:
    return [len(segment) for segment in segments_of(strategy, gradients)]


def shares(strategy: Strategy) -> list[float]:
    total = sum(gradient.bytes for gradient in BACKWARD)
    segments = segments_of(strategy, BACKWARD)
    return [round(100 * sum(each.bytes for each in s) / total, 2) for s in segments]


def test_the_reference_model() -> None:
    assert len(FORWARD) == 161
    assert sum(gradient.bytes for gradient in FORWARD) == 4 * 25_557_032
    assert FORWARD[14] == Gradient("layer1.0.downsample.1.bias", 4 * 256, "float32")
    assert FORWARD[14].layer == "layer1.0.downsample.1"


@pytest.mark.parametrize(
    ("percentages", "ends", "percent"),
    [
        ([96.54, 3.46], [107, 160], [96.54, 3.46]),
        ([80, 20], [60, 160], [79.69, 20.31]),
        ([60, 20, 20], [28, 60, 160], [64.52, 15.18, 20.31]),
        ([50, 50], [22, 160], [51.16, 48.84]),
    ],
)
def test_by_size(percentages: list[float], ends: list[int], percent: list[float]) -> None:
    strategy = by_size(percentages)
    assert strategy.last_indices(BACKWARD) == ends
    assert shares(strategy) == percent


def test_by_index() -> None:
    gradients = BACKWARD[:160]
    assert counts(by_index([20, 100, 159]), gradients) == [21, 80, 59]
    assert counts(by_index([159]), gradients) == [160]


@pytest.mark.parametrize(
    ("size", "count", "forward", "backward"),
    [
        (16, 50, [51, 49, 33, 9, 9, 10], [8, 9, 9, 18, 33, 51, 33]),
        (32, 50, [51, 51, 37, 18, 4], [17, 27, 51, 51, 15]),
        (0, 50, [161], [161]),
    ],
)
def test_by_megabytes(size: int, count: int, forward: list[int], backward: list[int]) -> None:
    assert counts(Megabytes(size, count), FORWARD) == forward
    assert counts(Megabytes(size, count), BACKWARD) == backward


def test_megabytes_of_the_segments() -> None:
    sizes = [sum(each.bytes for each in s) / MIB for s in segments_of(Megabytes(16, 50), FORWARD)]
    assert [round(size, 1) for size in sizes] == [3.1, 16.7, 23.8, 16.0, 17.0, 20.8]


def test_below_zero_megabytes_every_layer_is_a_segment() -> None:
    layers = list(dict.fromkeys(gradient.layer for gradient in FORWARD))
    assert len(layers) == 107  # 53 convolutions, as many normalisations, and the last one
    assert [s[0].layer for s in segments_of(Megabytes(-1), FORWARD)] == layers


def test_a_count_of_one_or_less_is_no_limit() -> None:
    assert counts(Megabytes(10_000, 1), FORWARD) == [161]
    assert counts(Count(0), FORWARD) == [161]


def test_by_count_a_layer_is_never_split() -> None:
    assert counts(Count(50), FORWARD) == [51, 51, 51, 8]


def test_by_threshold_what_overflows_opens_the_next() -> None:
    gradients = [
        Gradient(name, size, "float32") for name, size in zip("abcde", (4, 4, 1, 9, 8), strict=True)
    ]
    assert Threshold(8).last_indices(gradients) == [1, 2, 3, 4]
    assert Threshold(0).last_indices(gradients) == [0, 1, 2, 3, 4]
    assert Threshold(10).last_indices(gradients) == [2, 3, 4]
    assert Threshold(100).last_indices(gradients) == [4]


def test_one_gradient_by_the_default_is_one_segment() -> None:
    assert counts(Size(), BACKWARD[:1]) == [1]
    assert counts(Auto(), BACKWARD) == [108, 53]


def test_lenient_indices() -> None:
    assert Index((20, 35), strict=False).last_indices(BACKWARD) == [20, 35, 160]
    assert Index((20, 500), strict=False).last_indices(BACKWARD) == [20, 160]


LISTS = st.lists(
    st.builds(
        Gradient,
        st.sampled_from(["a.weight", "a.bias", "b.c.weight", "d", "e/kernel"]),
        st.integers(0, 100),
        st.sampled_from(["float32", "float16"]),
    ),
    max_size=30,
).map(lambda each: [g._replace(name=f"{n // 3}.{g.name}{n}") for n, g in enumerate(each)])
STRATEGIES = st.one_of(
    st.builds(Threshold, st.integers(0, 300)),
    st.lists(st.integers(0, 10), min_size=1, max_size=8)
    .filter(any)
    .map(lambda parts: Size(tuple(100 * part / sum(parts) for part in parts))),
    st.sets(st.integers(0, 40), min_size=1, max_size=8).map(
        lambda last: Index(tuple(sorted(last)), strict=False)
    ),
    st.builds(Megabytes, st.sampled_from([-1, 0, 1e-5, 1e-4, 32]), st.integers(0, 9)),
    st.builds(Count, st.integers(0, 9)),
    st.just(Auto()),
)


@pytest.mark.thorough
@settings(max_examples=40)
@given(STRATEGIES, LISTS)
def test_every_gradient_is_in_one_segment_in_order_and_of_one_dtype(
    strategy: Strategy, gradients: list[Gradient]
) -> None:
    if isinstance(strategy, Size) and len(strategy.percentages) > len(gradients) > 0:
        if strategy != Size():
            with pytest.raises(ValueError, match="segments of"):
                strategy.last_indices(gradients)
        return
    segments = segments_of(strategy, gradients)
    places = {gradient: place for place, gradient in enumerate(gradients)}
    assert sorted(places[each] for s in segments for each in s) == list(range(len(gradients)))
    for segment in segments:
        assert segment
        assert len({gradient.dtype for gradient in segment}) == 1
        assert [places[each] for each in segment] == sorted(places[each] for each in segment)
    if len({gradient.dtype for gradient in gradients}) == 1:
        assert [each for segment in segments for each in segment] == gradients


@pytest.mark.parametrize(
    ("percentages", "text"),
    [
        ([], r"\[\] is not a list"),
        ("50", "'50' is not a list"),
        ([50, "50"], "'50' is no number"),
        ([True, 99], "True is no number"),
        ([-1, 101], "-1 is no number"),
        ([float("nan"), 100], "nan is no number"),
        ([50, 49], r"sum to 99, not to 100"),
        ([12.5] * 7 + [6.25] * 2, "9 segments"),
    ],
)
def test_percentages_that_are_refused(percentages: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        by_size(percentages)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([], r"\[\] is not a list"),
        (5, "5 is not a list"),
        ([1, True], "True is no whole number"),
        ([1.0], r"1\.0 is no whole number"),
        ([-1, 3], "-1 is no whole number"),
        ([3, 3], "3 does not come after 3"),
        ([4, 2], "2 does not come after 4"),
        ([*range(9)], "9 segments"),
    ],
)
def test_indices_that_are_refused(indices: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        by_index(indices)


def test_what_does_not_fit_the_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match=r"index:1,5: the last index must be 160.*not 5"):
        by_index([1, 5]).last_indices(BACKWARD)
    with pytest.raises(ValueError, match="3 segments of 2 gradients"):
        by_size([50, 25, 25]).last_indices(BACKWARD[:2])


@pytest.mark.parametrize(
    "arguments", [("16", 50, True), (True, 50, True), (16, 5.0, True), (16, True, True), (16, 5, 1)]
)
def test_wrong_types_of_fleets_arguments(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="must be"):
        by_megabytes(*arguments)


def test_fleets_arguments() -> None:
    assert by_megabytes() == Megabytes(32, 50)
    assert by_megabytes(16) == Megabytes(16, 50)
    assert by_megabytes(fuse_all_reduce_ops=False) == Threshold(0)


@pytest.mark.parametrize("segmentation", [None, "mb:16"])
def test_an_argument_that_is_unknown_is_named_with_those_that_are_known(segmentation: Any) -> None:
    known = "segmentation, fuse_grad_size_in_MB, fuse_grad_count, fuse_all_reduce_ops"
    with pytest.raises(TypeError, match=f"^there is no argument lr_typo; .* {known}$"):
        resolve(segmentation, fuse_grad_count=5, lr_typo=1)


def test_fleets_other_name_of_the_count() -> None:
    assert resolve(None, _fuse_grad_size_in_TFLOPS=5) == Megabytes(32, 5)
    assert resolve(None, _fuse_grad_size_in_TFLOPS=5, fuse_grad_count=None) == Megabytes(32, 5)
    with pytest.warns(UserWarning, match="fuse_grad_count=7 wins over _fuse_grad.*_TFLOPS=5"):
        assert resolve(None, _fuse_grad_size_in_TFLOPS=5, fuse_grad_count=7) == Megabytes(32, 7)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("threshold", Threshold()),
        ("threshold:64", Threshold(64 * MIB)),
        ("size", Size()),
        ("size:60,20,20", Size((60, 20, 20))),
        ("index:28,60,160", Index((28, 60, 160))),
        ("size:33.3333333,66.6666667", Size((33.3333333, 66.6666667))),
        (f"threshold:{5_000_001 / MIB}", Threshold(5_000_001)),
        ("mb:16", Megabytes(16, 50)),
        ("mb:1.23456789", Megabytes(1.23456789, 50)),
        ("mb:16,20", Megabytes(16, 20)),
        ("count:50", Count(50)),
        ("auto", Auto()),
        ("auto:learned.json", Auto("learned.json")),
    ],
)
def test_texts(text: str, strategy: Strategy) -> None:
    read = read_strategy(text)
    assert read == strategy
    assert read_strategy(read.spec) == read


def test_what_was_set_otherwise_has_a_text() -> None:
    for strategy in (by_size([100 / 7] * 7), by_size([50, 50]), Size(), Megabytes(16, 20)):
        assert read_strategy(strategy.spec) == strategy
    assert by_size([50, 50.0]).spec == "size:50,50"


@pytest.mark.parametrize(
    "text",
    ["", "bogus", "size:", "size:50", "size:a,b", "size:nan", "index", "index:1.5", "mb", "mb:x",
     "mb:1,2,3", "count", "count:1.5", "threshold:-1", "threshold:inf", "threshold:1e308",
     f"count:{'9' * 400}", "auto:"],
)  # fmt: skip
def test_texts_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_strategy(text)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40), st.data())
@settings(max_examples=100)
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
