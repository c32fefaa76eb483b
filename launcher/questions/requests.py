"""What a person may ask of one job while it runs; the answers are plain dicts.

| request | arguments | answer |
|---|---|---|
| about | | {pid, command, ranks, directory, started}: which job it is |
| look | | the job: see snapshot.py; the ranks count from the first look on |
| stack | rank | {stack} |
| tensor | name | {name, calls, others}: see `merge` in tensor_calls.py |
| timeline | steps | {file, host, steps}, when so many steps of rank 0 have ended |

An answer with `error`, a sentence, is all there is where a request cannot be answered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.common.connections.orders import STACK, TENSOR, TIMELINE
from hvdlite.launcher.live.job_view import JobView, RankView
from hvdlite.launcher.live.snapshot import Snapshot
from hvdlite.launcher.questions.asking import Answer, Asking
from hvdlite.launcher.questions.tensor_calls import merge

ABOUT, LOOK = "about", "look"
ANSWER_SECONDS = 3.0
TIMELINE_SECONDS = 3600.0  # Steps may be long, and a rank gives up itself where there are none.
MOST_RANKS = 256  # That are asked about one tensor.
MOST_STEPS = 1000
LONGEST_NAME = 500

Done = Callable[[Answer], None]


class Requests:
    """The requests to one job; ``look()`` returns it as it is now, and begins to count.

    `about` tells which job it is.
    """

    def __init__(self, job: JobView, asking: Asking, look: Callable[[], Snapshot]) -> None:
        self.about: Answer = {}
        self._job, self._asking, self._look = job, asking, look

    def make(self, request: Sequence[Any], done: Done) -> None:
        """Answer a request, now or later. Whatever it is, this raises nothing."""
        match request:
            case ["about"]:
                done(self.about)
            case ["look"]:
                done({**self._look(), "job": self.about})
            case ["stack", int(rank)]:
                self._stack(rank, done)
            case ["tensor", str(name)] if len(name) <= LONGEST_NAME:
                self._tensor(name, done)
            case ["timeline", int(steps)] if 0 < steps <= MOST_STEPS:
                self._timeline(steps, done)
            case _:
                done({"error": f"there is no request {str(request)[:80]}"})

    def _known(self, rank: int, done: Done) -> RankView | None:
        view = self._job.ranks.get(rank)
        if view is None:
            done({"error": f"rank {rank} has not been heard of"})
        return view

    def _stack(self, rank: int, done: Done) -> None:
        view = self._known(rank, done)
        if view is not None:
            self._asking.ask([view], STACK, (), ANSWER_SECONDS, lambda found: done(_one(found)))

    def _tensor(self, name: str, done: Done) -> None:
        ranks = self._job.in_order()[:MOST_RANKS]

        def merged(found: dict[int, Answer]) -> None:
            done(merge(name, found, time.time()))

        self._asking.ask(ranks, TENSOR, (name,), ANSWER_SECONDS, merged)

    def _timeline(self, steps: int, done: Done) -> None:
        view = self._known(0, done)
        if view is None:
            return
        moment = time.strftime("%Y%m%d-%H%M%S")
        path = os.path.abspath(f"hvdlite-timeline-{moment}.json")

        def written(found: dict[int, Answer]) -> None:
            done({"host": view.host, **_one(found)})

        self._asking.ask([view], TIMELINE, (path, steps), TIMELINE_SECONDS, written)


def _one(found: dict[int, Answer]) -> Answer:
    """Return the only answer; an error says whose it is."""
    ((rank, answer),) = found.items()
    return {"error": f"rank {rank}: {answer['error']}"} if "error" in answer else answer
