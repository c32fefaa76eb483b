"""Asks ranks for what they alone know, and hands on the answers: see connections/order_lines.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvdlite.common.connections.loop import Loop, Timer
from hvdlite.common.connections.order_lines import BEGUN, Answers, Order, pack_order
from hvdlite.launcher.live.job_view import RankView

Answer = dict[str, Any]  # With an "error" where there is none.
Done = Callable[[dict[int, Answer]], None]
Later = Callable[[Answer], None]
Ask = Callable[
    [Sequence[Any], Later], None
]  # Of one who looks: a request, and what gets the answer.
SILENT = (
    "does not answer: it has not come to hvd.init() yet, or its Python stands still, such as in a "
    "library that never lets other threads run"
)


class Asking:
    """The questions that are open. ``give(number, line)`` gives an order, or says why it cannot."""

    def __init__(self, loop: Loop, give: Callable[[int, str], str]) -> None:
        self._loop, self._give = loop, give
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answers] = {}  # By the launcher's number of the process.
        self._questions: dict[int, tuple[_Question, int]] = {}  # By order: of which rank.
        self._later: dict[int, Later] = {}  # By order, what has begun.

    def ask(
        self, ranks: Iterable[RankView], kind: str, arguments: tuple[Any, ...], seconds: float,
        done: Done, later: Later | None = None,
    ) -> None:  # fmt: skip
        """Call ``done({rank: answer})`` when all have answered, or after so many seconds.

        A rank that says it has begun answers once more, with which `later` is called.

        Raises `ValueError` for arguments that are too long.
        """
        question = _Question(done, later)
        for view in ranks:
            number = next(self._numbers)
            line = pack_order(Order(number, kind, arguments))
            question.open[number] = view.number, view.rank
            self._answers.setdefault(view.number, Answers()).expect(number)
            self._questions[number] = question, view.rank
            why = self._give(view.number, line)
            if why:
                self._take(number, {"error": why}, last=False)
        question.timer = self._loop.call_after(seconds, lambda: self._give_up(question))
        self._end_if_answered(question)

    def receive(self, process: int, line: str) -> None:
        """Take a line of an answer of a process."""
        answers = self._answers.get(process)
        complete = None if answers is None else answers.add(line)
        if complete is not None:
            number, value = complete
            unreadable = {"error": "gave an answer that cannot be read"}
            answer = value if isinstance(value, dict) else unreadable
            if number in self._later:
                self._later.pop(number)(answer)
            else:
                self._take(number, answer)

    def _take(self, number: int, answer: Answer, *, last: bool = True) -> None:
        question, rank = self._questions.pop(number)
        process, _ = question.open.pop(number)
        self._answers[process].forget(number)
        if question.later is not None and BEGUN in answer:
            self._answers[process].expect(number)
            self._later[number] = question.later
        question.found[rank] = answer
        if last:
            self._end_if_answered(question)

    def _give_up(self, question: _Question) -> None:
        for number in list(question.open):
            self._take(number, {"error": SILENT}, last=False)
        self._end_if_answered(question)

    def _end_if_answered(self, question: _Question) -> None:
        if not question.open and not question.ended:
            question.ended = True
            if question.timer is not None:
                question.timer.cancel()
            question.done(question.found)


class _Question:
    def __init__(self, done: Done, later: Later | None) -> None:
        self.done, self.later = done, later
        self.open: dict[int, tuple[int, int]] = {}  # Order -> process and rank.
        self.found: dict[int, Answer] = {}
        self.timer: Timer | None = None
        self.ended = False
