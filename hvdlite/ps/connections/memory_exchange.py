"""How the two ends of a Unix socket hand each other their memory, when both have proved themselves.

Each end sends a few bytes with the descriptor of its memory, and takes those of the other end;
what follows are messages. Both ends are on the same host, and processes of the same user.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.loop import READ, Loop
from hvdlite.common.connections.strangers import check_credentials
from hvdlite.ps.connections.shared_memory import SharedMemory, Window
from hvdlite.ps.connections.shared_payloads import Sharing

MAGIC = b"hvdlips2"
SWAP_SECONDS = 60.0  # The other end may be busy.


def new_name() -> str:
    """Return a name of a Unix socket that leaves no file, and that no other process has."""
    return f"hvdlite-ps-{os.urandom(16).hex()}"


def is_here(name: str) -> bool:
    """Return whether the process with this name is on this host, and of this user."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            if connection.connect_ex(f"\0{name}") != 0:
                return False
            check_credentials(connection)  # Else it would refuse this process, and TCP goes.
            return True
    except (OSError, ProtocolError):  # An OSError without a free descriptor.
        return False


def swap(
    loop: Loop, connection: socket.socket, memory: SharedMemory,
    done: Callable[[Sharing], None], failed: Callable[[str], None] = lambda why: None,
) -> Callable[[], None]:  # fmt: skip
    """Hand over the own memory for that of the other end; where that fails, close.

    What is returned gives it up.
    """
    pending = True

    def end(why: str) -> None:
        nonlocal pending
        if pending:
            pending = False
            loop.forget(connection.fileno())
            connection.close()
            failed(why)

    def take(_events: int) -> None:
        nonlocal pending
        try:
            window = _receive(connection)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            end(f"its memory does not come: {error}")
            return
        pending = False
        loop.forget(connection.fileno())
        done(Sharing(memory, window))

    try:
        check_credentials(connection)
        socket.send_fds(connection, [MAGIC], [memory.descriptor])
    except (OSError, ProtocolError) as error:
        end(str(error))
    else:
        loop.watch(connection.fileno(), READ, take)
        loop.call_after(SWAP_SECONDS, lambda: end("its memory does not come"))
    return lambda: end("it was given up")


def _receive(connection: socket.socket) -> Window:
    data, descriptors, *_ = socket.recv_fds(connection, len(MAGIC), 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    try:
        if data != MAGIC or len(descriptors) != 1:
            raise ProtocolError(f"it says {data!r} with {len(descriptors)} descriptors")
        return Window(descriptors[0])
    except ProtocolError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
