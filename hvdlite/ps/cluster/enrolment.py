"""The part of a process in a cluster: its hello to the scheduler, and its beats.

A scheduler that comes again does not know the address of this process any more; its hello is
repeated then. While the scheduler is away, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvdlite.common.base.errors import (
    ConfigError,
    HorovodInternalError,
    HorovodVersionMismatchError,
)
from hvdlite.common.requests.handles import Handle
from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections import system
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.connection import Connection
from hvdlite.ps.connections.messages import SCHEDULER, Message

# Members that are idle use little of a processor then. Silence that counts as a loss has several.
BEAT_SECONDS, BEATS_OF_SILENCE = 2.0, 4


class Enrolment:
    """A member of a cluster. `changed(body)` hears of each answer to a beat, in the client."""

    def __init__(
        self, client: Client, settings: ClusterSettings, *, number: int | None = None,
        address: str = "", changed: Callable[[Mapping[str, Any]], None],
    ) -> None:  # fmt: skip
        self._client, self._settings = client, settings
        self._changed = changed
        # What each beat says: the layout in which this member is, and its tables; their versions
        # in a server.
        self.standing: Callable[[], dict[str, Any]] = lambda: {"layout": 0, "tables": {}}
        self.number = number
        self._hello: dict[str, Any] = {
            "role": settings.role, "number": number, "address": address,
            "node_id": settings.node_id or system.random_bytes(8).hex(),
            "num_servers": settings.num_servers, "num_workers": settings.num_workers,
            "joins": settings.joins,
        }  # fmt: skip
        self._welcome = Handle()
        self.connection: Connection = client.connect(settings.scheduler, SCHEDULER, self._refuse)
        self.connection.receive = self._receive
        self.connection.news = lambda message: self._changed(message.body)
        self._beats = False  # A beat is under way.
        self._beats_again = False  # There is more to say, when it is answered.
        self._done: dict[int, Callable[[Message], None]] = {}
        self._failure = ""  # Why the scheduler answers nothing any more.

    def enter(self, seconds: float) -> Mapping[str, Any]:
        """Say hello, and wait until all have come; return the welcome.

        Raises HorovodVersionMismatchError where the scheduler is another version of hvdlite,
        ConfigError where the settings of this process are at fault, as the scheduler says,
        and HorovodInternalError where not all have come, or the scheduler does not answer.
        """
        self._client.call(self._say_hello)
        if not self._welcome.ended_within(seconds):
            hint = "are all servers and workers started?"
            caller = self.connection.caller
            if not caller.is_connected:
                trouble = caller.trouble or "nobody there has proved to be one"
                hint = (
                    f"nothing was said to it, since it is not reached ({trouble}). Is it running, "
                    "is HVDLITE_SCHEDULER right, does another program have its port, and do all "
                    "processes have the same HVDLITE_PS_TLS and HVDLITE_PS_TOKEN?"
                )
            raise HorovodInternalError(
                f"the scheduler at {self._settings.scheduler} (HVDLITE_SCHEDULER) has not let this "
                f"{self._settings.role} in within {seconds:g} seconds: {hint}"
            )
        body: Mapping[str, Any] = self._welcome.wait()
        silence = min(self._settings.worker_seconds, self._settings.server_seconds)
        self._client.every(min(BEAT_SECONDS, silence / BEATS_OF_SILENCE), self._beat)
        return body

    def request(self, message: Message, done: Callable[[Message], None]) -> None:
        """Send a request to the scheduler, in the client."""
        if self._failure:
            done(Message("failed", body={"why": self._failure}))
        else:
            self._done[self.connection.send(message)] = done

    def fail_requests(self, why: str) -> None:
        """Let all that waits for the scheduler end, or will: it is not answered any more.

        In the client.
        """
        self._failure = why
        waiting, self._done = self._done, {}
        for done in waiting.values():
            done(Message("failed", body={"why": why}))

    def leave(self, seconds: float = 5.0, why: str = "") -> None:
        """Leave the cluster; wait for the scheduler's answer, at most `seconds`.

        With the reason `why`, the cluster cannot go on: all members hear of it.
        """
        message = Message("leave", body={"why": why} if why else {})
        answered = Handle()  # Not one of the client, whose requests may all have failed.
        self._client.call(lambda: self._say_leave(message, answered.complete), answered.complete)
        answered.ended_within(seconds)

    # -- the conversation

    def _say_leave(self, message: Message, done: Callable[[Message], None]) -> None:
        """Say it again to a scheduler that has come again, and has to hear the hello first."""

        def answered(answer: Message) -> None:
            if answer.kind == "restarted":
                self._say_leave(message, done)
            else:
                done(answer)

        # Also after a failure, of which the scheduler may know.
        self._done[self.connection.send(message)] = answered

    def _say_hello(self) -> None:
        self.connection.send(Message("hello", body=self._hello))

    def _beat(self) -> None:
        if not self._beats:
            self.tell()

    def tell(self) -> None:
        """Let the scheduler hear at once how this member stands, in the client.

        All that is new while it has not answered is said at once, too.
        """
        self._beats_again = self._beats
        if not self._beats:
            self._beats = True
            self.connection.send(Message("beat", body=self.standing()))

    def _refuse(self, error: Exception) -> None:
        if not self._welcome.poll():
            if not isinstance(error, HorovodVersionMismatchError):
                error = ConfigError(f"the scheduler says: {error}")
            self._welcome.fail(error)

    def _receive(self, message: Message) -> None:
        done = self._done.pop(message.request, None)
        if message.kind == "restarted":
            self._beats = False
            self._say_hello()
            if done is not None:
                done(message)
        elif message.kind == "refused":
            why = f"the scheduler says: {message.body['why']}"
            if self._welcome.poll():  # It was a member.
                self._client.on_failure(HorovodInternalError(why))
            elif message.body.get("failed"):
                self._welcome.fail(HorovodInternalError(why))
            else:
                self._welcome.fail(ConfigError(why))
        elif message.kind == "welcome":
            self.number = self._hello["number"] = message.body["number"]
            self._changed(message.body)
            if not self._welcome.poll():
                self._welcome.complete(message.body)
        elif message.kind == "beat":
            self._beats = False
            if self._beats_again:
                self.tell()
            if message.body:  # Else the scheduler waits for others that it is to know.
                self._changed(message.body)
        elif done is not None:
            done(message)
