"""The three rules for cutting gradients into segments, and when none of them helps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.common.segmentation.parsing import by_size
from hvdlite.common.segmentation.rules import TimedReduction
from hvdlite.tools.trace_report import Advice, advise

MIB = 1 << 20
FP_END, BP_END, END = 10.0, 30.0, 45.0


def advice(*reductions: tuple[float, float, float], end: float = END) -> Advice:
    """Forward takes 10 s, backward 20 s; `reductions` are start, end and MiB."""
    return advise(
        FP_END, BP_END, end, [TimedReduction(a, b, int(n * MIB)) for a, b, n in reductions]
    )


def test_rule_1_the_first_starts_early_and_the_last_is_long() -> None:
    given = advice((15, 25, 50), (30, 40, 50))
    assert given.rule == 1
    assert given.segmentation == "size:80,20"  # the reference's own example
    assert "last cut later" in given.why
    three = advice((12, 20, 40), (20, 26, 30), (30, 38, 30))
    assert (three.rule, three.percentages) == (1, (40, 48, 12))


def test_rule_2_the_first_starts_late_and_ends_after_backward() -> None:
    given = advice((26, 40, 90), (40, 42, 10))
    assert given.rule == 2
    assert given.segmentation == "size:80,20"  # the reference's own example
    assert "cut earlier" in given.why


def test_rule_3_backward_has_room() -> None:
    given = advice((27, 29, 95), (31, 38, 5))
    assert given.rule == 3
    assert given.percentages == (71.2, 23.8, 5)
    assert "add a segment" in given.why


def test_rule_3_where_all_are_reduced_together() -> None:
    given = advice((30, 42, 97))
    assert (given.rule, given.segmentation) == (3, "size:80,20")


@pytest.mark.parametrize(
    ("reductions", "why"),
    [
        ([(15, 25, 80), (30, 31, 20)], "nothing to gain"),
        ([(15, 25, 80)], "nothing to gain"),  # a model whose last gradients are not reduced
        ([(12, 40, 80), (40, 50, 20)], "longer than there is to hide it behind"),
        ([], "nothing to cut"),
    ],
)
def test_where_no_cut_helps(reductions: list[tuple[float, float, float]], why: str) -> None:
    given = advice(*reductions, end=55)
    assert (given.rule, given.percentages, given.segmentation) == (0, (), "")
    assert why in given.why


def test_without_the_end_of_backward_nothing_can_be_said() -> None:
    assert "backward_done()" in advise(None, None, 45, [TimedReduction(1, 2, 3)]).why


def test_without_the_end_of_forward_backward_is_two_thirds_of_both() -> None:
    late = [TimedReduction(25.0, 40.0, 90 * MIB), TimedReduction(40.0, 42.0, 10 * MIB)]
    assert advise(None, 30.0, 45.0, late).rule == 2
    early = [TimedReduction(12.0, 22.0, 50 * MIB), TimedReduction(30.0, 42.0, 50 * MIB)]
    assert advise(None, 30.0, 45.0, early).rule == 1


spans = st.tuples(st.floats(0, 100), st.floats(0, 30), st.integers(1, 10**9))


@given(st.lists(spans, min_size=1, max_size=20))
def test_what_is_proposed_can_be_used(drawn: list[tuple[float, float, int]]) -> None:
    reductions = sorted(
        TimedReduction(start, start + length, size) for start, length, size in drawn
    )
    given = advise(FP_END, BP_END, 200.0, reductions)
    assert bool(given.percentages) == (given.rule > 0)
    if given.percentages:
        by_size(given.percentages)  # 1 to 8 numbers from 0 that sum to 100
