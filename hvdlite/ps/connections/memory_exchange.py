"""How the two ends of a Unix socket hand each other their memory, when both have proved themselves.

Each end sends a few bytes with two descriptors, and takes those of the other end; what follows are
messages. One is that of its memory. The other is the end of a pipe, which the other end keeps as
long as it looks at that memory: when it is closed there, by whatever end of that process, what was
lent is free again. Both ends are on the same host, and processes of the same user.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.loop import READ, Loop
from hvdlite.common.connections.strangers import Stranger, check_credentials
from hvdlite.ps.connections.shared_memory import Descriptor, SharedMemory, Window
from hvdlite.ps.connections.shared_payloads import Sharing

MAGIC = b"hvdlips3"
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
    stranger = Stranger(
        loop, connection, lambda error: failed(f"its memory does not come: {error}")
    )

    def take(_events: int) -> None:
        try:
            window = _receive(connection)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            stranger.fail(error)
            return
        stranger.release()
        done(_shared(loop, memory, window, loan))

    try:
        check_credentials(connection)
        loan, held = map(Descriptor, os.pipe())
        socket.send_fds(connection, [MAGIC], [memory.descriptor, held.number])
    except (OSError, ProtocolError) as error:
        stranger.fail(error)
    else:
        loop.watch(connection.fileno(), READ, take)
        loop.call_after(SWAP_SECONDS, lambda: stranger.fail(TimeoutError("it is silent")))
    return stranger.close


def _shared(loop: Loop, memory: SharedMemory, window: Window, loan: Descriptor) -> Sharing:
    """Return what both ends share; what was lent is let go when the other end's pipe is closed."""
    sharing = Sharing(memory, window)

    def end(_events: int) -> None:
        loop.forget(loan.number)
        sharing.let_go()

    loop.watch(loan.number, READ, end)
    return sharing


def _receive(connection: socket.socket) -> Window:
    data, numbers, *_ = socket.recv_fds(connection, len(MAGIC), 2)
    for number in numbers:
        os.set_inheritable(number, False)
    descriptors = [*map(Descriptor, numbers)]
    if data != MAGIC or len(descriptors) != 2:
        raise ProtocolError(f"it says {data!r} with {len(descriptors)} descriptors")
    return Window(*descriptors)
