"""Connect a worker to the driver of its job."""

from __future__ import annotations

import socket
import time

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.connections.address import Address
from hvdlite.common.meeting import dial as meeting
from hvdlite.common.meeting.participant import Participant
from hvdlite.common.membership.frames import CLAIM_JOB

CONNECT_SECONDS = 30.0  # The driver listens before it starts its first worker.
PAUSE_SECONDS = 0.05  # Between two attempts.


def dial(address: Address, number: int, secret: bytes) -> socket.socket:
    """Return the connection of worker `number` to the driver at `address`; it does not block.

    Raises `HorovodInternalError` when the driver cannot be reached or refuses this worker, and
    `HorovodVersionMismatchError`.
    """
    end = time.monotonic() + CONNECT_SECONDS
    me = Participant(number, 0, secret, end, job=CLAIM_JOB)
    while True:
        try:
            connection = meeting.dial(address, me, end)
        except meeting.Refused as refused:
            raise HorovodInternalError(
                f"the driver of the job at {address} refuses: {refused}"
            ) from refused
        except (OSError, ProtocolError) as error:
            if time.monotonic() > end or isinstance(error, (FileNotFoundError, ProtocolError)):
                raise HorovodInternalError(
                    f"worker {number} cannot reach the driver of the job at {address} ({error}): "
                    "it has ended, or HVDLITE_ELASTIC_DRIVER is that of another job"
                ) from error
            time.sleep(PAUSE_SECONDS)
        else:
            connection.setblocking(False)
            return connection
