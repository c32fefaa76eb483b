"""What a person may ask of one job while it runs; the answers are plain dicts.

| request | arguments | answer |
|---|---|---|
| about | | {pid, command, ranks, directory, started}: which job it is |
| look | | the job: see snapshot.py; the ranks count from the first look on |
| stack | rank | {stack} |
| tensor | name | {name, calls, others}: see `merge` in tensor_calls.py |
| timeline | steps | {file, host, steps}, when rank 0 has begun it; its end is an event |

An answer with `error`, a sentence, is all there is where a request cannot be answered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hvdlite.common.connections.order_lines import BEGUN, STACK, TENSOR, TIMELINE
from hvdlite.launcher.inspection.asking import Answer, Asking, Later
from hvdlite.launcher.inspection.tensor_calls import merge
from hvdlite.launcher.live.job_view import JobView, RankView
from hvdlite.launcher.live.snapshot import Snapshot

ABOUT, LOOK = "about", "look"
ANSWER_SECONDS = 3.0
MOST_RANKS = 256  # That are asked about one tensor.
MOST_STEPS = 1000
LONGEST_NAME = 500

Done = Callable[[Answer], None]


class Requests:
    """The requests to one job; ``look()`` returns it as it is now, and begins to count.

    ``note(text)`` keeps an event of the job, and `about` tells which job it is.
    """

    def __init__(
        self, job: JobView, asking: Asking, look: Callable[[], Snapshot],
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.about: Answer = {}
        self._job, self._asking, self._look, self._note = job, asking, look, note

    def make(self, request: Sequence[Any], done: Done) -> None:
        """Answer a request once, now or later. Whatever it is, this raises nothing.

        Nor must `done`.
        """
        try:
            answer = self._make(request, done)
        except Exception as error:  # No question may end a training.
            answer = _refusal(error)
        if answer is not None:
            done(answer)

    def _make(self, request: Sequence[Any], done: Done) -> Answer | None:
        """Return the answer, or None where `done` gets it from ranks."""
        match request:
            case ["about"]:
                return self.about
            case ["look"]:
                return {**self._look(), "job": self.about}
            case ["stack", int(rank)]:
                self._ask(
                    [self._known(rank)], STACK, (),
                    lambda found: {"stack": str(_one(found)["stack"])}, done,
                )  # fmt: skip
            case ["tensor", str(name)] if len(name) <= LONGEST_NAME:
                ranks = self._job.in_order()[:MOST_RANKS]
                self._ask(ranks, TENSOR, (name,), partial(merge, name, at=time.time()), done)
            case ["timeline", int(steps)] if 0 < steps <= MOST_STEPS:
                self._timeline(steps, done)
            case _:
                raise ValueError(f"there is no request {str(request)[:80]}")
        return None

    def _ask(
        self, ranks: Sequence[RankView], kind: str, arguments: tuple[Any, ...],
        spelled: Callable[[dict[int, Answer]], Answer], done: Done,
        later: Later | None = None,
    ) -> None:  # fmt: skip
        def answered(found: dict[int, Answer]) -> None:
            try:
                answer = spelled(found)
            except Exception as error:  # Of what a rank has answered.
                answer = _refusal(error)
            done(answer)

        self._asking.ask(ranks, kind, arguments, ANSWER_SECONDS, answered, later)

    def _known(self, rank: int) -> RankView:
        view = self._job.ranks.get(rank)
        if view is None:
            raise ValueError(f"rank {rank} has not been heard of")
        return view

    def _timeline(self, steps: int, done: Done) -> None:
        view = self._known(0)
        name = f"hvdlite-timeline-{time.strftime('%Y%m%d-%H%M%S')}.json"
        path = os.path.join(self.about.get("directory", ""), name)

        def begun(found: dict[int, Answer]) -> Answer:
            return {"host": view.host, "file": str(_one(found)[BEGUN]), "steps": steps}

        def ended(answer: Answer) -> None:
            try:
                made = int(_one({0: answer})["steps"])
                said = f"rank 0 has written {made} steps to {os.path.basename(str(answer['file']))}"
                if made < steps:
                    said += f", and then came none for {answer['seconds']:g} s"
                self._note(said)
            except Exception as error:  # Of what a rank has answered.
                self._note(f"the timeline of rank 0: {_refusal(error)['error']}")

        self._ask([view], TIMELINE, (path, steps), begun, done, ended)


def _one(found: dict[int, Answer]) -> Answer:
    """Return the only answer. Raises `ValueError` where a rank has none."""
    ((rank, answer),) = found.items()
    if "error" in answer:
        raise ValueError(f"rank {rank}: {answer['error']}")
    return answer


def _refusal(error: Exception) -> Answer:
    if isinstance(error, ValueError):
        return {"error": str(error)}
    return {"error": f"the answer cannot be read: {type(error).__name__}: {error}"}
