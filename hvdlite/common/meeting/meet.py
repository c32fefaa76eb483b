"""Let a rank meet the others, wherever its launch says."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.connections.address import Address, is_here, listen
from hvdlite.common.connections.frames import unpack
from hvdlite.common.connections.loop import Loop, lasting
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.client import Participant, ServerExchange
from hvdlite.common.meeting.exchange import Exchange
from hvdlite.common.meeting.launch import (
    MASTER,
    OWN,
    RENDEZVOUS,
    SLURM,
    TORCH_AGENT,
    TORCH_GROUP,
    Launch,
)
from hvdlite.common.meeting.server import MeetingServer
from hvdlite.common.meeting.start_wait import StartWait
from hvdlite.common.meeting.wire import JOB_BYTES, job_digest

# Meetings that this process serves: in a thread of its own, or as a rank that waits anyway.
#
# A port that is chosen first and bound later may be taken by another process in between. Here it is
# bound from the start, for as many meetings as the ranks hold.

GOODBYE_SECONDS = 2.0  # The longest wait of `close` for ranks that read the last answer.
# How long the end of a program that has the port may take, such as an earlier start of this job.
PORT_SECONDS = 3.0
POLL_SECONDS = 0.05
# What says where rank 0 listens, by the source of the launch; other sources are named themselves.
SAID_BY = {OWN: RENDEZVOUS, MASTER: "MASTER_ADDR"}


class ServedMeeting:
    """Serves the meetings of `size` ranks at `listener` until `close`, which closes it, too."""

    def __init__(self, listener: socket.socket, size: int, secret: str) -> None:
        self._loop = Loop()
        self._server = MeetingServer(self._loop, listener, range(size), size, secret.encode())
        self._over = False
        # Owns _server and _loop. Ends with close(), or with the process.
        self._thread = threading.Thread(target=self._serve, name="hvdlite-meeting", daemon=True)
        self._thread.start()
        lasting.add(self)

    def _serve(self) -> None:
        while not self._over:
            self._loop.run_once()
        self._server.close()

    def close(self) -> None:
        """End the meetings; ranks that wait in one learn it by the end of their connection."""
        lasting.discard(self)
        self._over = True
        self._loop.wake()
        self._thread.join()
        self._loop.close()

    def after_fork_in_child(self) -> None:
        """Close this process's copies of all descriptors."""
        self._loop.close()
        self._server.after_fork_in_child()


class _Own:
    """The rank that serves, as a guest of its own server."""

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        self.rank, self.members = rank, tuple(members)
        self.given = 0
        self.inbox: deque[bytes] = deque()

    def send(self, head: bytes) -> None:
        self.inbox.append(head)


class HostedExchange:
    """The exchange of `me`, which serves the meeting at `listener` while it waits; see `Exchange`.

    All ranks of the job may meet there, also those of another meeting. The port is closed by
    `close`, when the others have left, so that another program can have it.
    """

    def __init__(self, listener: socket.socket, me: Participant) -> None:
        self.rank, self.size = me.place
        self._own = _Own(me.rank, me.members or ())
        self._wait = StartWait(me.rank, me.size, me.deadline)
        self._loop = Loop()
        self._server = MeetingServer(
            self._loop, listener, range(me.size), me.size, me.secret, job=me.job
        )
        self._server.rounds.present(self._own)

    def allgather(self, body: bytes) -> list[bytes]:
        wire.check_body(body)
        rounds, wait = self._server.rounds, self._wait
        rounds.give(self._own, bytes(body))
        while not self._own.inbox:
            self._loop.run_once(wait.seconds())
            if self._own.inbox or not (wait.over or wait.line_is_due()):
                continue
            who = self._server.presence(self._own).spell()
            if not wait.over:
                wait.log(who)
                continue
            # The wait of all ranks ends. Those that have more time wait for another server, as this
            # rank may call init again.
            rounds.give_up(f"rank {self._own.rank} has given up to wait in init(): {who}")
            self._own.inbox.clear()
            raise wait.error(who)
        match message := unpack(self._own.inbox.popleft()):
            case [wire.BODIES, _, [*bodies]]:
                return bodies
            case [wire.FAIL, str(text), rank]:
                raise HorovodInternalError(text, rank)
            case [wire.OTHER_HVDLITE, _, version]:
                raise wire.mismatch(version)
        raise AssertionError(f"the server of this process sent {message[0]}")

    def close(self) -> None:
        self._server.rounds.leave(self._own)
        self._server.close(GOODBYE_SECONDS)
        self._loop.close()


def meet(launch: Launch, members: Sequence[int] | None, secret: bytes, deadline: float) -> Exchange:
    """Return the exchange of the rank that `launch` describes, which is no rank of MPI.

    `members` are the world ranks that meet, in the order of their new numbers; None is all of them.
    `deadline` is in monotonic seconds. Raises `ConfigError` for an address that cannot be used, and
    as `ServerExchange` does.
    """
    if launch.source in (TORCH_AGENT, TORCH_GROUP):
        from hvdlite.common.meeting.torch_store import (
            TorchStoreExchange,
            agent_store,
            default_store,
        )

        agent = launch.source == TORCH_AGENT
        store = agent_store(launch.addresses[0], deadline) if agent else default_store()
        return TorchStoreExchange(
            store, launch.rank, launch.size, deadline, members, job=launch.incarnation
        )
    first = 0 if members is None else min(members)
    me = Participant(
        launch.rank, launch.size, secret, deadline, members, _job(launch, first),
        f"rank {first} listens there ({SAID_BY.get(launch.source, launch.source)} says where)"
        if launch.rank_0_serves else "",
    )  # fmt: skip
    # Meetings that other ranks serve go on beside this one. Those of Slurm look for their server at
    # several ports anyway.
    beside = first if launch.rank_0_serves and launch.source != SLURM else 0
    addresses = [each._replace(port=each.port + beside) for each in launch.addresses]
    if launch.rank_0_serves and launch.rank == first:
        return HostedExchange(_listen(addresses, launch, members, deadline), me)
    return ServerExchange(addresses, me)


def _job(launch: Launch, first: int) -> bytes:
    """Return what proves that a server is that of this job, this start and these members.

    A server that somebody else runs serves all meetings of its job, one after the other.
    """
    words = [launch.incarnation]
    if launch.source == SLURM:  # Neighbouring ports belong to other jobs.
        words.append(launch.job)
    if first and launch.rank_0_serves:
        words.append(f"from rank {first}")
    label = " ".join(filter(None, words))
    return job_digest(label) if label else bytes(JOB_BYTES)


def _listen(
    addresses: Sequence[Address], launch: Launch, members: Sequence[int] | None, deadline: float
) -> socket.socket:
    """Return a listener at the first of `addresses` that is free."""
    if launch.rank and not is_here(addresses[0]):
        raise ConfigError(
            f"comm={list(members or ())} leaves out rank 0, on whose host the ranks meet "
            f"({addresses[0].host}), and rank {launch.rank} runs on another host: start the job "
            "with hvdlite-run or torchrun, which serve the meeting of any ranks"
        )
    end = min(deadline, time.monotonic() + PORT_SECONDS)
    while True:
        for address in addresses:
            try:
                return listen(address)
            except OSError as error:
                last = address == addresses[-1] and time.monotonic() >= end
                if error.errno != errno.EADDRINUSE or last:
                    raise _cannot_listen(launch, address, error) from error
        time.sleep(POLL_SECONDS)


def _cannot_listen(launch: Launch, address: Address, error: OSError) -> ConfigError:
    cause = os.strerror(error.errno or 0)
    remedy = "Choose a free port of this host, and give it to all ranks"
    if error.errno == errno.EADDRINUSE:
        remedy += (
            f"; or is this a second process with {' and '.join(launch.evidence)}? Give each "
            "process a rank of its own"
        )
    return ConfigError(
        f"rank {launch.rank} cannot listen at {address}, where the ranks meet (from "
        f"{launch.source}): {cause}. {remedy}"
    )
