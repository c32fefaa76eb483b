"""Connect a worker to the driver of its job."""

from __future__ import annotations

import socket

from hvdlite.common.base.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    ProtocolError,
)
from hvdlite.common.connections.address import Address
from hvdlite.common.connections.dial import Failure, Limits, Refused, reach
from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.prove import Party
from hvdlite.common.membership import frames

CONNECT_SECONDS = 30.0  # The driver listens before it starts its first worker.


def dial(loop: Loop, address: Address, number: int, secret: bytes) -> socket.socket:
    """Return the connection of worker `number` to the driver at `address`; it runs `loop`.

    Raises `HorovodInternalError` when the driver cannot be reached or refuses this worker, and
    `HorovodVersionMismatchError`.
    """
    end = loop.now() + CONNECT_SECONDS

    def limits() -> Limits:
        left = max(0.001, end - loop.now())
        return Limits(left, left)

    def failed(failures: list[Failure]) -> None:
        for _, error, _ in failures:
            if isinstance(error, HorovodVersionMismatchError):
                raise error
            if isinstance(error, Refused):
                raise HorovodInternalError(
                    f"the driver of the job at {address} refuses: {error}"
                ) from error
        error = failures[-1].error
        if loop.now() > end or isinstance(error, (FileNotFoundError, ProtocolError)):
            raise HorovodInternalError(
                f"worker {number} cannot reach the driver of the job at {address} ({error}): "
                "it has ended, or HVDLITE_ELASTIC_DRIVER is that of another job"
            ) from error

    me = Party(secret, frames.WORKER, frames.DRIVER)
    return reach(loop, [address], me, frames.claim(number), limits, failed)
