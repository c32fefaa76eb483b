"""What an agent passes on between the launcher and the processes of its host, at a Unix socket.

Ranks that keep their places meet there (`HostMeeting`). Each worker of an elastic job has a
connection with the driver (`WorkerRelay`): the end of either process is seen at once, and workers
of other hosts need no port of the launcher. The agent also tells what the driver cannot see from
afar: workers that are stopped, or have been silent for too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from hvdlite.common.connections.address import Address, listen
from hvdlite.common.meeting.rounds import Key
from hvdlite.common.meeting.server import MeetingServer
from hvdlite.launcher.agent_process import system
from hvdlite.launcher.agent_process.rank_process import AgentFolder, RankProcess
from hvdlite.launcher.agents.channel import Channel, unsqueeze
from hvdlite.launcher.processes.event_loop import EventLoop

STOPPED = "T"  # The state of a process after SIGSTOP; that of one in a debugger is "t".
# So long a worker may be stopped: of one that is suspended with its job, this process may hear just
# before its own turn comes, and go on long before it. That counts for less.
RESUME_SECONDS = 4.0


class WorkerRelay:
    """Passes every message on; `workers` are the processes of this host by number."""

    def __init__(
        self, job: Mapping[str, Any], folder: AgentFolder, loop: EventLoop, channel: Channel,
        workers: Mapping[int, RankProcess],
    ) -> None:  # fmt: skip
        self._channel, self._workers = channel, workers
        self._silence_seconds: float = job["worker_silence_seconds"]
        # Running workers of which the driver knows that they cannot go on.
        self._told: set[int] = set()
        self._now = loop.awake_seconds
        self._stopped: dict[int, float] = {}  # Workers that are stopped, and since when.
        self._server = system.serve_workers(
            loop, folder.socket, job["secret"].encode(),
            lambda number, message: channel.send("said", number, message), self._note_end,
            self._runs,
        )  # fmt: skip

    def _runs(self, number: int) -> bool:
        worker = self._workers.get(number)
        return worker is not None and worker.code is None

    def _note_end(self, number: int) -> None:
        if self._runs(number):  # Else its exit code follows at once.
            self._channel.send("closed", number)

    def tell(self, numbers: list[int], message: bytearray) -> None:
        """Send a message of the driver, which was squeezed, to workers here."""
        head = unsqueeze(message)
        for number in numbers:
            self._server.send_head(number, head)

    def finish(self, number: int) -> None:
        """Pass on the last words of a worker whose process has ended."""
        self._server.hear_last_words(number)
        self._told.discard(number)

    def look(self) -> None:
        """Tell of workers that run and cannot go on; called now and then."""
        silence = self._server.silence()  # Of those that are connected.
        now = self._now()
        for number, worker in self._workers.items():
            if self._runs(number) and system.state_of(worker.pid) == STOPPED:
                if now - self._stopped.setdefault(number, now) >= RESUME_SECONDS:
                    self._tell_once(number, "its process was stopped")
            else:
                self._stopped.pop(number, None)
            if silence.get(number, 0.0) >= self._silence_seconds:
                why = f"it has not answered for {self._silence_seconds:g} seconds"
                self._tell_once(number, why)

    def _tell_once(self, number: int, why: str) -> None:
        if self._runs(number) and number not in self._told:
            self._told.add(number)
            self._channel.send("silent", number, why)


class HostMeeting:
    """The meeting of the ranks of one host.

    A round that ranks of other hosts take part in goes through the launcher, which merges what the
    agents have gathered.
    """

    def __init__(
        self, job: dict[str, Any], folder: AgentFolder, loop: EventLoop, channel: Channel
    ) -> None:
        self._alone = alone = len(job["ranks"]) == job["size"]
        self._channel = channel
        self._told: dict[Key, list[int]] = {}  # Who has come to the rounds that are not complete.
        self._server = MeetingServer(
            loop, listen(Address(path=folder.socket)), job["ranks"], job["size"],
            job["secret"].encode(),
            None if alone else lambda key, bodies: channel.send(
                "gathered", list(key.members), key.number, bodies
            ),
            withdrawn=lambda key: channel.send("withdrawn", list(key.members), key.number),
        )  # fmt: skip
        self.rounds = self._server.rounds  # Takes what the launcher says of other hosts.

    def tell_who_came(self) -> None:
        """Tell the launcher who waits here for other ranks of this host; called now and then."""
        came = {} if self._alone else self.rounds.incomplete()
        for key in {**self._told, **came}:
            ranks = came.get(key, [])
            if ranks != self._told.get(key):
                self._channel.send("came", list(key.members), key.number, ranks)
        self._told = came

    def deliver(self, members: Sequence[int], number: int, bodies: bytearray) -> None:
        """Give the ranks here the bodies of all, which were squeezed."""
        self.rounds.deliver(Key(tuple(members), number), msgpack.unpackb(unsqueeze(bodies)))

    def note_missing(self, members: Sequence[int], ranks: list[int]) -> None:
        """Let the ranks that wait here know who has not come on other hosts."""
        self.rounds.missing_elsewhere[tuple(members)] = ranks
