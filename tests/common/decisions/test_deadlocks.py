"""Ranks that wait for each other are found when it is certain, and never before."""

from __future__ import annotations

import pytest

from hvdlite.common.decisions.stall_inspector import (
    FIRST_SECONDS,
    LONGEST_SECONDS,
    DeadlockDetector,
    StallInspector,
    Waiting,
)
from hvdlite.common.requests.messages import WaitReply


def waiting(**missing: tuple[int, ...]) -> list[Waiting]:
    return [Waiting(name, ranks, 0.0) for name, ranks in missing.items()]


def reply(rank: int, *names: str, number: int = 1, in_gradients: int = 0) -> WaitReply:
    places = tuple(f"script.py, line {rank}" for _ in names)
    return WaitReply(number, rank, names, places, (in_gradients,) * len(names))


# What waits, who is asked, for what each waits, and who waits for ever.
TABLE = {
    "two": (waiting(a=(1,), b=(0,)), (0, 1), {0: "a", 1: "b"}, {0, 1}),
    "a late rank": (waiting(a=(1,), b=(1,)), (), {}, set()),
    "one works": (waiting(a=(1,), b=(0,)), (0, 1), {0: "a", 1: ""}, set()),
    "one waits for what comes": (
        waiting(a=(1, 2), b=(0, 2), c=(2,)),
        (0, 1),
        {0: "a", 1: "c"},
        set(),
    ),
    "a ring": (waiting(a=(1,), b=(2,), c=(0,)), (0, 1, 2), {0: "a", 1: "b", 2: "c"}, {0, 1, 2}),
    "one beside a pair": (
        waiting(a=(1,), b=(0,), c=(0, 3), d=(2,)),
        (0, 1, 2, 3),
        {0: "a", 1: "b", 2: "c", 3: ""},
        {0, 1, 2},
    ),
    "two threads": (
        waiting(a=(1, 2), b=(0, 2), c=(2,)),
        (0, 1),
        {0: "a c", 1: "b"},
        set(),
    ),
    "two threads that wait": (
        waiting(a=(1,), b=(0,), c=(1,)),
        (0, 1),
        {0: "a c", 1: "b"},
        {0, 1},
    ),
    "of a name in two process sets": (
        [Waiting("a", (1,), 0.0), Waiting("b", (0,), 0.0), Waiting("a", (2,), 0.0)],
        (0, 1, 2),
        {0: "a", 1: "b", 2: ""},
        set(),
    ),
    "a message from any rank": (
        [Waiting("a", (1, 2), 0.0, one_is_enough=True), Waiting("b", (0,), 0.0)],
        (0, 1, 2),
        {0: "a", 1: "b", 2: ""},
        set(),
    ),
    "a message from any rank that is stuck": (
        [Waiting("a", (1, 2), 0.0, one_is_enough=True), *waiting(b=(0,), c=(0,))],
        (0, 1, 2),
        {0: "a", 1: "b", 2: "c"},
        {0, 1, 2},
    ),
    "of another tensor": (waiting(a=(1,), b=(0,)), (0, 1), {0: "a", 1: "complete"}, set()),
}


@pytest.mark.parametrize("case", TABLE)
def test_who_waits_for_ever(case: str) -> None:
    tensors, asked, names, stuck = TABLE[case]
    detector = DeadlockDetector()
    query = detector.ask(tensors, 0.0, 1.0)
    assert (query.ranks if query else ()) == asked
    texts = [detector.receive(reply(rank, *names[rank].split()), tensors) for rank in asked]
    assert not any(texts[:-1])
    text = texts[-1] if texts else None
    if not stuck:
        assert text is None
        return
    assert text is not None and text.startswith(f"{len(stuck)} ranks wait for each other")
    for rank in stuck:
        assert f"  rank {rank} waits for '{names[rank].split()[0]}'" in text, text
        assert f"    script.py, line {rank}" in text, text
    assert len(text.splitlines()) <= 10


def test_a_report_of_many_ranks_is_short_and_comes_once() -> None:
    tensors = waiting(**{f"t{rank}": ((rank + 1) % 64,) for rank in range(64)})
    detector = DeadlockDetector()
    reports = []
    for number in (1, 2):
        assert detector.ask(tensors, 0.0, float(number)) is not None
        replies = [reply(rank, f"t{rank}", number=number) for rank in range(64)]
        reports += [detector.receive(each, tensors) for each in replies]
    (text,) = filter(None, reports)
    assert "and 60 more ranks" in text and len(text.splitlines()) <= 10


@pytest.mark.parametrize(("in_gradients", "told"), [((1, 0), True), ((1, 1), False)])
def test_ranks_of_which_one_has_no_more_batches_are_told_of_join(
    in_gradients: tuple[int, int], told: bool
) -> None:
    tensors = waiting(a=(1,), b=(0,))
    detector = DeadlockDetector()
    assert detector.ask(tensors, 0.0, 1.0) is not None
    detector.receive(reply(0, "a", in_gradients=in_gradients[0]), tensors)
    text = detector.receive(reply(1, "b", in_gradients=in_gradients[1]), tensors)
    assert text is not None and ("docs/howto/uneven_data.md" in text) == told


def test_a_flag_that_is_set_is_not_recommended_and_the_end_shows_where_ranks_are() -> None:
    tensors = waiting(a=(1,), b=(0,), c=(1, 2))
    inspector, detector = StallInspector(0, 3), DeadlockDetector(3)
    assert detector.ask(tensors, 0.0, 1.0) is not None
    replies = [reply(0, "a"), reply(1, "b"), reply(2)]
    *_, text = [detector.receive(each, tensors) for each in replies]
    assert text is not None and "ended after 3 s" in text and "ends such a job" not in text
    report = inspector.inspect(tensors, 3.0, detector.deadlock(tensors))
    assert report is not None and report.shutdown and report.missing == (0, 1, 2)
    assert report.text.splitlines() == [
        "stalled for up to 3 s: 2 ranks wait for each other, and none of them will ever go on. Let "
        "all ranks make these calls in one order, and none for rank 0 alone.",
        "  rank 0 waits for 'a', not yet submitted by rank 1:",
        "    script.py, line 0",
        "  rank 1 waits for 'b', not yet submitted by rank 0:",
        "    script.py, line 1",
        "  Rank 2 has not submitted: c.",
        "  The limit of 3 s is over: the job ends, or goes on without late ranks if it is elastic.",
    ]
    # A deadlock that was left, such as by a loss in an elastic job, is none any more.
    assert detector.deadlock(waiting(a=(1,), c=(1, 2))) is None


def test_nothing_is_certain_once_anything_has_happened() -> None:
    tensors = waiting(a=(1,), b=(0,))
    detector = DeadlockDetector()
    assert detector.ask(tensors, 0.0, 1.0) is not None
    assert detector.receive(reply(0, "a"), tensors) is None
    detector.disturb()
    assert detector.receive(reply(1, "b"), tensors) is None


def test_an_answer_to_an_earlier_question_does_not_count() -> None:
    """The thread may have gone on, and submitted the next tensor of that name, between both."""
    tensors = waiting(a=(1,), b=(0,))
    detector = DeadlockDetector()
    for now in (1.0, 2.0):
        assert detector.ask(tensors, 0.0, now) is not None
    assert detector.receive(reply(0, "a", number=1), tensors) is None
    assert detector.receive(reply(1, "b", number=2), tensors) is None
    assert detector.receive(reply(0, "a", number=2), tensors) is not None


def test_questions_become_rare_until_something_is_complete() -> None:
    detector = DeadlockDetector()
    now, times = detector.next_check(5.0), []
    assert now == 5.0 + FIRST_SECONDS
    for _ in range(9):
        detector.ask(waiting(a=(1,)), 5.0, now)
        times.append(detector.next_check(5.0) - now)
        now = detector.next_check(5.0)
    assert times[:3] == [1, 2, 4] and times[-1] == LONGEST_SECONDS
    assert detector.next_check(now) == now + FIRST_SECONDS
