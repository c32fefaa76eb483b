"""The agent of one host: starts ranks there, and tells the launcher what becomes of them.

    python -m hvdlite.launcher.agent_process.agent                 by the launcher itself, or by ssh
    python -m hvdlite.launcher.agent_process.agent HOST:PORT ...   by srun: connects back

The agent is the parent of its ranks. Nothing of a job outlives its channel: where the launcher has
gone, or says nothing for too long, the agent ends its ranks within two seconds. It imports little,
since each start waits for it.

| from the launcher                       | from the agent                          |
|-----------------------------------------|-----------------------------------------|
|                                         | hello {channel, python, pid, host ...}  |
| job {directory, variables, ranks ...}   | ready, or refused TEXT                  |
| part NAME BYTES (of a file)             |                                         |
| start NUMBER {rank, command, variables} | started NUMBER PID                      |
|                                         | or unable NUMBER TEXT (a worker)        |
|                                         | output NUMBER STREAM BYTES              |
|                                         | raised NUMBER WORDS, stall NUMBER TEXT  |
|                                         | live {NUMBER: LINE} (once a second)     |
| signal SIGNAL [NUMBERS]                 | part NUMBER BYTES, exit NUMBER CODE     |
| deliver MEMBERS ROUND [BODIES]          | gathered MEMBERS ROUND {RANK: BODY}     |
| missing MEMBERS [RANKS], fail TEXT RANK | came MEMBERS ROUND [RANKS]              |
|                                         | withdrawn MEMBERS ROUND                 |
| finished [RANKS] (with exit code 0)     |                                         |
| order NUMBER LINE, count                | answer NUMBER LINE (see orders.py)      |
| tell [NUMBERS] MESSAGE                  | said NUMBER MESSAGE, closed NUMBER      |
|                                         | silent NUMBER TEXT (or it is stopped)   |
|                                         | leaving TEXT                            |
| beat                                    | beat                                    |

Workers of an elastic job meet by `tell` and `said` (see relay.py), ranks of other jobs by `deliver`
and `gathered`. NUMBER is the launcher's name of a process. It is never used twice, so a rank that
is started again is told from its predecessor. CODE is an exit code, or minus the signal that ended
the process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.agent_process import system
from hvdlite.launcher.agent_process.rank_process import LIVE, RankProcess, RankVariables
from hvdlite.launcher.agent_process.relay import HostMeeting, WorkerRelay
from hvdlite.launcher.agents.channel import (
    BEATS,
    MUCH_BYTES,
    PART_BYTES,
    PROLOGUE,
    VERSION,
)
from hvdlite.launcher.decisions.hosts import ORPHAN_SECONDS
from hvdlite.launcher.processes import rank_orders
from hvdlite.launcher.processes.signals import SignalInbox

TOLD_SECONDS = 2.0  # From SIGTERM to SIGKILL, when the agent itself was told to end.
LOOK_SECONDS = 1.0
FOLDER_REMEDY = "Remedy: make the same folder there, or share it between the hosts"


class Agent:
    """The agent, with one end of the channel; `signals` are those to its process."""

    def __init__(self, read_fd: int, write_fd: int, signals: SignalInbox) -> None:
        self.loop = system.EventLoop()
        self._signals = signals
        self.loop.listen(signals.fileno(), signals.drain)
        self.channel = system.Channel(
            self.loop, read_fd, write_fd, received=self._receive, ended=self._lose_launcher
        )
        self._handlers: dict[str, Callable[..., None]] = {
            "job": self._job, "part": self._part, "start": self._start, "signal": self._signal,
            "order": lambda number, line: rank_orders.give(self.folder.path, number, line),
            "count": lambda: rank_orders.count(self.folder.path),
        }  # fmt: skip
        self._ranks: dict[int, RankProcess] = {}
        self._number_of: dict[int, int] = {}  # Rank -> the process that is that rank now.
        self._reported: set[int] = set()
        self._counted: dict[int, str] = {}  # Lines about what the processes count.
        self._tell_at = 0.0  # When the launcher gets them.
        self._variables: RankVariables | None = None
        self._meeting: HostMeeting | None = None
        self._relay: WorkerRelay | None = None  # Of an elastic job, in the place of a meeting.
        self._asked_to_leave = False  # By SIGTERM; the next signal ends the ranks.
        self._told_to_leave = False  # The same, and the launcher does not know it yet.
        self._told_before_job = False  # By a signal to end, which the job then hears.
        self._look_at = 0.0  # When the meeting is looked at again.
        self._silence_seconds = 0.0  # After which the launcher counts as lost; 0: never.
        self._kill_at: float | None = None
        self._paused = False
        self.folder = system.AgentFolder()

    # -- the loop

    def run(self) -> None:
        """Run until the launcher has gone, and no rank is left."""
        try:
            self.begin()
            while self.goes_on():
                self.loop.run_once(self.patience())
                self.turn()
        finally:
            self.end()

    def end(self) -> None:
        """Leave nothing on this host, however the agent ends."""
        for rank in self._ranks.values():
            rank.end_group()
        self.folder.remove()
        system.tidy()

    def begin(self) -> None:
        """Say hello."""
        self.channel.send_raw(PROLOGUE)
        self.channel.send("hello", {
            "channel": VERSION, "python": list(sys.version_info[:3]), "executable": sys.executable,
            "pid": os.getpid(), "host": socket.gethostname(), "folder": self.folder.path,
        })  # fmt: skip

    def goes_on(self) -> bool:
        """Return whether the launcher may still say something, or a rank runs."""
        return self.channel.open or any(rank.code is None for rank in self._ranks.values())

    def turn(self) -> None:
        """Do what follows from what has come, and from the time."""
        while (number := self._signals.take()) is not None:
            self._leave(number)
        self._reap()
        # The ranks wait while the launcher does not keep up with their output.
        much = self.channel.queued_bytes >= MUCH_BYTES
        if much != self._paused:
            self._paused = much
            for rank in self._ranks.values():
                (rank.pause if much else rank.resume)()
        now = system.now()
        self._look(now)
        limit = self._silence_seconds
        if limit and self.channel.open and not self.channel.beat(now, limit):
            self._lose_launcher()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._signal_all(signal.SIGKILL)

    def _look(self, now: float) -> None:
        if self._counted and now >= self._tell_at:
            self._tell_at = now + LOOK_SECONDS
            if not self._paused:  # Else newer ones will come when the launcher keeps up again.
                self.channel.send("live", self._counted)
            self._counted = {}
        if self._meeting is not None and now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._meeting.tell_who_came()
        if self._relay is not None:
            self._relay.look()
            if self._told_to_leave:
                self._told_to_leave = False
                self.channel.send("leaving", "its host is shut down (the agent there got SIGTERM)")

    def _leave(self, number: int) -> None:
        """End the ranks; those of an elastic job can end in order when the host is shut down."""
        if self._variables is None:
            self._told_before_job = True
        elif self._relay is None or number != signal.SIGTERM or self._asked_to_leave:
            self._end_ranks(TOLD_SECONDS)
        else:
            self._asked_to_leave = self._told_to_leave = True

    def patience(self) -> float:
        """Return after how many seconds the next turn is due, though nothing comes."""
        longest = LOOK_SECONDS
        if self._silence_seconds:
            longest = min(longest, self._silence_seconds / (2 * BEATS))
        if self._kill_at is not None:
            return max(0.0, min(longest, self._kill_at - system.now()))
        return longest

    def _reap(self) -> None:
        """Report the ranks that have ended: first what they said, then their code."""
        for number, rank in self._ranks.items():
            if number not in self._reported and rank.code is not None:
                self._reported.add(number)
                rank.drain()
                self._report_events()
                if self._relay is not None:
                    self._relay.finish(number)
                if self._relay is not None or rank.code == 0:
                    rank.end_group()
                self.folder.begin_answer(number)
        while self.channel.queued_bytes < MUCH_BYTES:
            ended, part = self.folder.next_answer_part(PART_BYTES)
            if ended is None:
                break
            if part:
                self.channel.send("part", ended, part)
            else:
                self.channel.send("exit", ended, self._ranks[ended].code)
                if self._relay is not None:  # Many more may follow.
                    del self._ranks[ended], self._number_of[ended]
                    self._reported.remove(ended)
                    rank_orders.forget(self.folder.path, ended)

    def _report_events(self) -> None:
        for event, rank, text in self.folder.said():
            number = self._number_of.get(rank)
            if number is None:
                continue
            if event == LIVE:
                self._counted[number] = text
            else:
                self.channel.send(event, number, text)

    # -- what the launcher says

    def _receive(self, kind: str, fields: list[Any]) -> None:
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(*fields)

    def _job(self, job: dict[str, Any]) -> None:
        if self._told_before_job:
            self.channel.send("refused", "got a signal to end before the job began")
            return
        try:
            system.enter(job["directory"])
        except OSError as error:
            why = f"cannot enter {job['directory']}: {error.strerror}. {FOLDER_REMEDY}"
            self.channel.send("refused", why)
            return
        if job["call"] is not None:
            self.folder.link(job["call"])
        self._silence_seconds = job["silence_seconds"]
        self._variables = RankVariables(job, self.folder, system.environ())
        try:
            self._variables.check_devices()
        except ConfigError as error:
            self.channel.send("refused", f"cannot start its ranks: {error}")
            return
        self.loop.listen(self.folder.events_fd, lambda _fd: self._report_events())
        if job["elastic"]:  # Workers talk with the driver by the socket at which others meet.
            self._relay = WorkerRelay(job, self.folder, self.loop, self.channel, self._ranks)
            self._handlers["tell"] = self._relay.tell
        else:
            self._meeting = meeting = HostMeeting(job, self.folder, self.loop, self.channel)
            self._handlers |= {
                "deliver": meeting.deliver, "missing": meeting.note_missing,
                "fail": meeting.rounds.fail, "finished": meeting.rounds.finish,
            }  # fmt: skip
        self.channel.send("ready")

    def _part(self, name: str, data: bytes) -> None:
        self.folder.append(name, data)

    def _start(self, number: int, rank: dict[str, Any]) -> None:
        assert self._variables is not None

        def output(stream: str, data: bytes) -> None:
            if data:
                self.channel.send("output", number, stream, data)

        try:
            environ = self._variables.environ_of(rank)
        except ConfigError as error:  # Of an elastic job, whose slots are not checked before.
            self.channel.send("unable", number, str(error))
            return
        if (before := self._number_of.get(rank["rank"])) is not None:
            self._ranks[before].end_group()  # What its children do would disturb the next one.
        process = system.RankProcess(
            rank["command"], environ, self.loop, output,
            cores=self._variables.cores_of(rank), terminals=rank["terminals"],
        )  # fmt: skip
        self._ranks[number] = process
        self._number_of[rank["rank"]] = number
        self.channel.send("started", number, process.pid)

    def _signal(self, number: int, wanted: list[int]) -> None:
        for name in wanted or list(self._ranks):
            if name in self._ranks:
                self._ranks[name].signal(number)

    # -- the end

    def _lose_launcher(self) -> None:
        self.channel.close()
        self._end_ranks(ORPHAN_SECONDS)

    def _end_ranks(self, patience_seconds: float) -> None:
        self._signal_all(signal.SIGTERM)
        if self._kill_at is None:
            self._kill_at = system.now() + patience_seconds

    def _signal_all(self, number: int) -> None:
        for rank in self._ranks.values():
            rank.signal(number)


def main(arguments: list[str]) -> int:
    """Run the agent over standard input and output, or over a connection to one of the addresses.

    Standard input and output then are no one else's.
    """
    if arguments:
        from hvdlite.launcher.agents import call_back

        secret = os.environ.pop(call_back.SECRET_VARIABLE, "")
        name = os.environ.get(os.environ.pop(call_back.NAMED_BY_VARIABLE, ""), "")
        connection = call_back.call_back(arguments, secret, name)
        read_fd, write_fd = os.dup(connection.fileno()), connection.detach()
    else:
        read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # It ends the sleep of the loop.
    with SignalInbox() as signals:  # Before there is a folder, which no signal may leave behind.
        try:
            agent = Agent(read_fd, write_fd, signals)
        except OSError as error:
            from hvdlite.launcher.hosts.ssh import CANNOT_RUN
            from hvdlite.launcher.processes.error_text import spell_os_error

            print(f"{CANNOT_RUN}cannot run the job: {spell_os_error(error)}", file=sys.stderr)
            return 1
        agent.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
