"""The meeting of the ranks of one host, as its agent serves it.

A round that ranks of other hosts take part in goes through the launcher, which merges what the
agents have gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from hvdlite.common.connections.address import Address, listen
from hvdlite.common.meeting.rounds import Key
from hvdlite.common.meeting.server import MeetingServer
from hvdlite.launcher.agent_process.agent_folder import AgentFolder
from hvdlite.launcher.agents.channel import Channel, unsqueeze
from hvdlite.launcher.processes.event_loop import EventLoop


class HostMeeting:
    """A meeting server on a Unix socket in the agent's folder."""

    def __init__(
        self, job: dict[str, Any], folder: AgentFolder, loop: EventLoop, channel: Channel
    ) -> None:
        def gathered(key: Key, bodies: dict[int, bytes]) -> None:
            channel.send("gathered", list(key.members), key.number, bodies)

        def withdrawn(key: Key) -> None:
            channel.send("withdrawn", list(key.members), key.number)

        self._alone = alone = len(job["ranks"]) == job["size"]
        self._channel = channel
        self._told: dict[Key, list[int]] = {}  # Who has come to the rounds that are not complete.
        self._server = MeetingServer(
            loop, listen(Address(path=folder.socket)), job["ranks"], job["size"],
            job["secret"].encode(), None if alone else gathered, withdrawn=withdrawn,
        )  # fmt: skip

    def tell_who_came(self) -> None:
        """Tell the launcher who waits here for other ranks of this host; called now and then."""
        came = {} if self._alone else self._server.incomplete()
        for key in {**self._told, **came}:
            ranks = came.get(key, [])
            if ranks != self._told.get(key):
                self._channel.send("came", list(key.members), key.number, ranks)
        self._told = came

    def deliver(self, members: Sequence[int], number: int, bodies: bytearray) -> None:
        """Give the ranks here the bodies of all, which were squeezed."""
        self._server.deliver(Key(tuple(members), number), msgpack.unpackb(unsqueeze(bodies)))

    def note_missing(self, members: Sequence[int], ranks: list[int]) -> None:
        """Let the ranks that wait here know who has not come on other hosts."""
        self._server.note_missing(tuple(members), ranks)

    def finish(self, ranks: Sequence[int]) -> None:
        """Let every rank raise that waits for a rank whose process has ended with exit code 0."""
        self._server.finish(ranks)

    def fail(self, text: str, rank: int) -> None:
        """Let every rank that waits raise `text`, which blames `rank`."""
        self._server.fail(text, rank)
