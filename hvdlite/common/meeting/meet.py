"""Let a rank meet the others, wherever its launch says."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.address import Address, is_here, listen
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
from hvdlite.common.meeting.serving import HostedExchange
from hvdlite.common.meeting.wire import JOB_BYTES, job_digest

# How long the end of a program that has the port may take, such as an earlier start of this job.
PORT_SECONDS = 3.0
POLL_SECONDS = 0.05
# What says where rank 0 listens, by the source of the launch; other sources are named themselves.
SAID_BY = {OWN: RENDEZVOUS, MASTER: "MASTER_ADDR"}


def meet(launch: Launch, members: Sequence[int] | None, secret: bytes, deadline: float) -> Exchange:
    """Return the exchange of the rank that `launch` describes, which is no rank of MPI.

    `members` are the world ranks that meet, in the order of their new numbers; None is all of them.
    `deadline` is in monotonic seconds. Raises `ConfigError` for an address that cannot be used, and
    as `ServerExchange` does.
    """
    if launch.source in (TORCH_AGENT, TORCH_GROUP):
        return _meet_in_store(launch, members, deadline)
    first = 0 if members is None else min(members)
    me = Participant(
        launch.rank, launch.size, secret, deadline, members, _job(launch, first),
        f"rank {first} listens there ({SAID_BY.get(launch.source, launch.source)} says where)"
        if launch.rank_0_serves else "",
    )  # fmt: skip
    addresses = [_shifted(each, launch, first) for each in launch.addresses]
    if launch.rank_0_serves and launch.rank == first:
        return HostedExchange(_listen(addresses, launch, members, deadline), me)
    return ServerExchange(addresses, me)


def _meet_in_store(launch: Launch, members: Sequence[int] | None, deadline: float) -> Exchange:
    from hvdlite.common.meeting.torch_store import TorchStoreExchange, agent_store, default_store

    agent = launch.source == TORCH_AGENT
    store = agent_store(launch.addresses[0], deadline) if agent else default_store()
    return TorchStoreExchange(
        store, launch.rank, launch.size, deadline, members, job=launch.incarnation
    )


def _shifted(address: Address, launch: Launch, first: int) -> Address:
    """Return where the meeting that rank `first` serves is: meetings of other ranks go on beside.

    Those of Slurm look for their server at several ports anyway.
    """
    if not launch.rank_0_serves or launch.source == SLURM:
        return address
    return address._replace(port=address.port + first)


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
