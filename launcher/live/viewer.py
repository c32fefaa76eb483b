"""What a person does with the table of a job: chooses a rank, and asks about it with keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.common.base.metrics import LONGEST_NAME
from hvdlite.launcher.decisions.lines import spell_ranks
from hvdlite.launcher.inspection.asking import Answer, Ask
from hvdlite.launcher.live.keyboard import DOWN, ENTER, ERASE, ERASE_ALL, ESCAPE, UP
from hvdlite.launcher.live.snapshot import Snapshot
from hvdlite.launcher.live.stragglers import spell
from hvdlite.launcher.live.table import spell_bytes

STEPS = 10  # Of a timeline.
OUTSTANDING_SECONDS = 1.0  # From which on it is no usual wait.
DIGIT_SECONDS = 2.0  # Digits that are typed within so long are of one number.
KEYS = "rank: arrows, number | s: stack | t: tensor | w: timeline of 10 steps"


class Viewer:
    """The state of one who looks at a job; ``ask(request, done)`` as in requests.py.

    `quit` is called by q, or Escape where there is nothing to close.
    """

    def __init__(
        self, ask: Ask, changed: Callable[[], None], quit: Callable[[], None] | None = None, *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._ask, self._changed, self._quit, self._now = ask, changed, quit, now
        self.job: Snapshot | None = None
        self.chosen: int | None = None
        self.panel: list[str] = []  # What was asked last.
        self._typed: str | None = None  # The name of a tensor, while it is typed.
        self._digits, self._digit_at = "", 0.0
        self._asked = 0  # An answer to an older question is not shown.

    @property
    def help(self) -> str:
        """One line: which keys there are."""
        if self._typed is not None:
            return f"tensor: {self._typed}_   (Enter: ask; Escape: do not)"
        return KEYS if self._quit is None else f"{KEYS} | q: quit"

    def press(self, key: str) -> None:
        """Take a key."""
        if self._typed is not None:
            self._type(key)
        elif key in (UP, DOWN, "k", "j"):
            self._move(-1 if key in (UP, "k") else 1)
        elif key.isdecimal():
            self._choose(key)
        elif key in KEY_CALLS:
            KEY_CALLS[key](self)
        if not key.isdecimal():
            self._digits = ""
        self._changed()

    # -- which rank

    def _ranks(self) -> list[int]:
        """Return the ranks in the order of the table."""
        rows = self.job["ranks"] if self.job is not None else []
        return [row["rank"] for row in sorted(rows, key=lambda row: (row["host"], row["rank"]))]

    def _move(self, by: int) -> None:
        ranks = self._ranks()
        if not ranks:
            return
        at = ranks.index(self.chosen) + by if self.chosen in ranks else 0
        self.chosen = ranks[max(min(at, len(ranks) - 1), 0)]

    def _choose(self, digit: str) -> None:
        ranks, before = self._ranks(), self._digit_at
        self._digit_at = self._now()
        if self._digit_at - before > DIGIT_SECONDS:
            self._digits = ""
        for digits in (self._digits + digit, digit):
            if int(digits) in ranks:
                self._digits, self.chosen = digits, int(digits)
                return

    # -- questions

    def _question(
        self, request: Sequence[Any], waiting: str, spelled: Callable[[Answer], list[str]]
    ) -> None:
        self._asked += 1
        number = self._asked
        self.panel = [waiting]

        def answered(answer: Answer) -> None:
            if number == self._asked:
                try:
                    self.panel = [str(answer["error"])] if "error" in answer else spelled(answer)
                except Exception as error:  # It may hold what no rank of ours would say.
                    self.panel = [f"the answer cannot be read: {type(error).__name__}: {error}"]
                self._changed()

        self._ask(request, answered)

    def _stack(self) -> None:
        rank = self._rank()
        if rank is not None:
            title = f"main thread of rank {rank}:"
            self._question(
                ["stack", rank], f"{title} ...",
                lambda answer: [title, *str(answer["stack"]).rstrip().splitlines()],
            )  # fmt: skip

    def _rank(self) -> int | None:
        """Return the chosen rank; without a choice the slow one, or the first."""
        ranks = self._ranks()
        if self.chosen not in ranks:
            slow = [row["rank"] for row in self.job["ranks"] if row["slow"]] if self.job else []
            self.chosen = next(iter([*slow, *ranks]), None)
        return self.chosen

    def _begin_name(self) -> None:
        rank = self._rank()
        rows = self.job["ranks"] if self.job is not None else []
        # A rank that hangs waits for none, but the others wait for it.
        rows = sorted(rows, key=lambda row: bool(row["rank"] != rank))
        name = next((row["tensor"] for row in rows if row["tensor"]), "")
        self._typed = name[:LONGEST_NAME]

    def _type(self, key: str) -> None:
        assert self._typed is not None
        if key == ENTER:
            name, self._typed = self._typed, None
            self._question(["tensor", name], f"{name}: ...", spell_tensor)
        elif key == ESCAPE:
            self._typed = None
        elif key == ERASE:
            self._typed = self._typed[:-1]
        elif key == ERASE_ALL:
            self._typed = ""
        elif len(key) == 1:
            self._typed = (self._typed + key)[:LONGEST_NAME]

    def _timeline(self) -> None:
        waiting = f"a timeline of the next {STEPS} steps of rank 0: ..."
        self._question(["timeline", STEPS], waiting, spell_timeline)

    def _leave(self) -> None:
        if self.panel:
            self._asked += 1
            self.panel = []
        elif self._quit is not None:
            self._quit()

    def _end(self) -> None:
        if self._quit is not None:
            self._quit()


KEY_CALLS = {
    "s": Viewer._stack, "t": Viewer._begin_name, "w": Viewer._timeline, ESCAPE: Viewer._leave,
    "q": Viewer._end,
}  # fmt: skip


def spell_tensor(answer: Answer) -> list[str]:
    """Return the lines of an answer about a tensor."""
    outstanding = _spell_outstanding(answer)
    if not answer["calls"] and outstanding:
        return outstanding
    if not answer["calls"]:
        names = [f"  {name}" for name in answer["others"]]
        if names:
            return [f"no tensor has the name {answer['wanted']!r}; of late there were:", *names]
        return [
            f"no tensor like {answer['wanted']!r} was exchanged since counting began: ask again"
        ]
    lines = [*outstanding, f"{answer['name']} on {answer['ranks']} ranks, the newest call first:"]
    lines += [f"{'ended':>12}{'took':>10}{'bytes':>11}{'tensors':>9}   who was last"]
    for call in answer["calls"]:
        when = f"-{spell(call['ago'])}" if call["ago"] else "last"
        late = "all at once"
        if call["last"] != call["waiting"]:
            late = f"rank {call['last']}: rank {call['waiting']} waited {spell(call['waited'])}"
        size = spell_bytes(call["bytes"])
        took = spell(call["seconds"])
        lines += [f"{when:>12}{took:>10}{size:>11}{call['tensors']:>9}   {late}"]
    return lines


def _spell_outstanding(answer: Answer) -> list[str]:
    """Return a line of a tensor that some ranks have submitted long ago; none of others."""
    waits = {int(rank): float(seconds) for rank, seconds in answer["waits"]}
    longest = max(waits.values(), default=0.0)
    if longest < OUTSTANDING_SECONDS and (answer["calls"] or not waits):
        return []
    missing = [rank for rank in answer["asked"] if rank not in waits]
    not_by = f", and not by {spell_ranks(missing)}" if missing else ""
    return [
        f"{answer['name']} is outstanding: submitted by {spell_ranks([*waits])}, {spell(longest)} "
        f"ago{not_by}"
    ]


def spell_timeline(answer: Answer) -> list[str]:
    """Return the lines of an answer about a timeline."""
    where = f" on host {answer['host']}" if answer.get("host") else ""
    return [
        f"rank 0 writes its next {answer['steps']} steps, and an event tells when it has:",
        f"{answer['file']}{where}",
        "Perfetto and chrome://tracing display it",
    ]
