"""Which rank failed first, and how; and by which steps a job is ended, an elastic one as well."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from hvdlite.launcher.decisions.lines import spans

NOT_FOUND, NOT_EXECUTABLE = 127, 126
KILLED_WITH_SHELL = "was killed together with its shell"
UNCAUGHT = 1  # what Python exits with after an exception


def signal_name(number: int) -> str:
    """Return "SIGKILL", or "signal 35" for a real-time signal, as most of these have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, and the exit code that the job gets from it."""

    rank: int
    code: int
    lost: str = ""  # how it was lost, where nobody knows its code
    by_choice: bool = False  # the process chose its code: it is no signal's
    cause: str = ""  # the exception that ended it, as "Type: text"
    alike: tuple[int, ...] = ()  # where several ranks raised this exception: these, and none first
    all_alike: bool = False  # and no other rank is left

    def __str__(self) -> str:
        if self.lost:
            return f"rank {self.rank} {self.lost}"
        if self.code == NOT_FOUND:
            return f"rank {self.rank} failed: its command was not found (exit code 127)"
        if self.code == NOT_EXECUTABLE:
            return f"rank {self.rank} failed: its command cannot be executed (exit code 126)"
        if self.cause:
            who = f"rank {self.rank} failed"
            if self.alike:
                count = len(self.alike)
                who = f"all {count} ranks" if self.all_alike else f"ranks {spans(self.alike)}"
                who += " failed alike"
            return f"{who}: {self.cause.rstrip('.')} (exit code {self.code})"
        try:
            name = signal.Signals(0 if self.by_choice else self.code - 128).name
        except ValueError:
            return f"rank {self.rank} failed with exit code {self.code}"
        return f"rank {self.rank} was killed by {name} (exit code {self.code})"


# The codes of ranks that are ended because of another one. That of a KeyboardInterrupt is 130.
_BY_US = {128 + signal.SIGTERM, 128 + signal.SIGKILL}


@dataclass
class FirstFailure:
    """What has been heard of the ranks, in the order of arrival."""

    started: dict[int, int] = field(default_factory=dict)  # rank -> process id, of it or its shell
    here: set[int] = field(default_factory=set)  # ranks on the launcher's host
    codes: dict[int, int] = field(default_factory=dict)  # rank -> exit code
    raised: dict[int, bool] = field(default_factory=dict)  # rank -> it is another rank's victim
    causes: dict[int, str] = field(default_factory=dict)  # rank -> the exception that ended it
    by_choice: set[int] = field(default_factory=set)  # ranks that are known to have chosen theirs
    lost: dict[int, str] = field(default_factory=dict)  # rank -> how
    closed: bool = False  # we are ending the ranks: who ends from now on is no suspect
    _suspects: list[int] = field(default_factory=list)

    def receive(self, event: str, rank: int, words: list[str]) -> None:
        """Take in one event: `start PID here|there`, `raised own|internal TEXT`, `exit CODE`."""
        if event == "start":
            self.started[rank] = int(words[0])
            if words[1] == "here":
                self.here.add(rank)
        elif event == "raised":
            self.raised[rank] = words[0] == "internal"
            self.causes[rank] = " ".join(words[1:])
            if not self.raised[rank]:
                self._suspect(rank)
        elif event == "exit":
            self._exit(rank, int(words[0]))

    def _exit(self, rank: int, code: int) -> None:
        self.codes[rank] = code
        if code and rank not in self.raised:
            self._suspect(rank)

    def end(self, rank: int, code: int) -> None:
        """Note the end of a rank by an exit code, or by a signal as its negative number."""
        if code > 0:
            self.by_choice.add(rank)
        self._exit(rank, code if code >= 0 else 128 - code)

    def lose(self, rank: int, how: str = KILLED_WITH_SHELL) -> None:
        """Note that nobody will tell the exit code of a rank, such as when its shell is gone."""
        self.lost[rank] = how
        self._suspect(rank)

    def _suspect(self, rank: int) -> None:
        if not self.closed:
            self._suspects.append(rank)

    @property
    def running(self) -> list[int]:
        """Ranks that have started and not ended."""
        return [rank for rank in self.started if rank not in self.codes and rank not in self.lost]

    @property
    def trouble(self) -> bool:
        """A rank has failed, or is about to end by an exception."""
        return bool(self._suspects or self.raised or any(self.codes.values()))

    def failure(self) -> Failure | None:
        """Return the first cause; ranks that only suffered from another's end come last.

        A rank that raised and then hung until we ended it failed with exit code 1. Of ranks that
        raised the same, such as all that disagree, none is the first.
        """
        failed = [rank for rank, code in self.codes.items() if code]
        failed.sort(key=lambda rank: rank not in self.raised)  # we may have ended the others
        for rank in [*self._suspects, *failed]:
            if rank in self.lost and rank not in self.raised:
                return Failure(rank, 128 + signal.SIGKILL, lost=self.lost[rank])
            code, cause = self._code(rank), self.causes.get(rank)
            if code == UNCAUGHT and cause:
                raised = (each for each, text in self.causes.items() if text == cause)
                alike = tuple(sorted(each for each in raised if self._code(each) == UNCAUGHT))
                if len(alike) == 1:
                    return Failure(rank, UNCAUGHT, cause=cause)
                others = {*self.started, *self.raised, *self.codes}.difference(alike)
                return Failure(alike[0], UNCAUGHT, cause=cause, alike=alike, all_alike=not others)
            if code:
                # After a signal or an exit of its own choice, what it printed before is no cause.
                return Failure(rank, code, by_choice=code > 128 and rank in self.by_choice)
        return None

    def _code(self, rank: int) -> int:
        """Return by which exit code a rank failed; 0: it did not."""
        code = self.codes.get(rank)
        if rank in self.raised and (code is None or (self.closed and code in _BY_US)):
            return UNCAUGHT
        return code or 0


# How a job is ended: which step comes when.


Plan = tuple[tuple[float, str], ...]

INTERRUPT, TERMINATE, KILL, ABANDON = "interrupt", "terminate", "kill", "abandon"
REPEATED = -1  # stands for a signal after the first
# (seconds after the step before, step). KILL ends the ranks, ABANDON their mpirun: it cleans up
# behind its ranks where it is let live. From a user's signal to the end it takes under 5 s.
AFTER_FAILURE: Plan = ((3.0, TERMINATE), (1.5, KILL), (1.0, ABANDON))  # first the others may speak
AFTER_SIGINT: Plan = ((0.0, INTERRUPT), (1.5, TERMINATE), (1.5, KILL), (0.7, ABANDON))
AFTER_SIGTERM: Plan = ((0.0, TERMINATE), (2.5, KILL), (1.0, ABANDON))
AT_ONCE: Plan = ((0.0, KILL), (0.7, ABANDON))
AFTER_ALL_RANKS: Plan = ((5.0, ABANDON),)  # every rank has ended, mpirun has not
AFTER_SIGNAL: dict[int, Plan] = {signal.SIGINT: AFTER_SIGINT, REPEATED: AT_ONCE}
SIGNALS = {INTERRUPT: signal.SIGINT, TERMINATE: signal.SIGTERM, KILL: signal.SIGKILL}


@dataclass
class Ending:
    """The steps that are left, with the time of the next."""

    plan: Plan
    due: float

    @classmethod
    def begin(cls, plan: Plan, now: float) -> Ending:
        """Start with the first step of `plan`."""
        return cls(plan, now + plan[0][0])

    def next_step(self, now: float) -> str | None:
        """Return the step that is due at `now`; each is returned once."""
        if not self.plan or now < self.due:
            return None
        step = self.plan[0][1]
        self.plan = self.plan[1:]
        self.due = now + self.plan[0][0] if self.plan else float("inf")
        return step
