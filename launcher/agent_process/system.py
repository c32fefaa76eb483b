"""The system, as an agent uses it: time, its folder, processes, and the ends of connections.

The modules of the agent ask this one, by its name, so that a simulated world can stand in for it
(see docs/simulation.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from hvdlite.common.connections.address import Address, listen
from hvdlite.common.connections.loop import Loop
from hvdlite.common.driver_link.server import WorkerServer
from hvdlite.launcher.agent_process import rank_process
from hvdlite.launcher.agents import channel
from hvdlite.launcher.inspection import runtime_folder
from hvdlite.launcher.processes import event_loop

now = time.monotonic
environ = os.environ.copy
enter = os.chdir  # The directory of the job.
EventLoop = event_loop.EventLoop
Channel = channel.Channel
AgentFolder = rank_process.AgentFolder
RankProcess = rank_process.RankProcess
tidy = runtime_folder.tidy


def serve_workers(
    loop: Loop, path: str, secret: bytes, said: Callable[[int, list[Any]], None],
    ended: Callable[[int], None], expects: Callable[[int], bool],
) -> WorkerServer:  # fmt: skip
    """Let workers connect with a Unix socket at `path`; see `WorkerServer`."""
    return WorkerServer(loop, listen(Address(path=path)), secret, said, ended, expects=expects)


def state_of(pid: int) -> str:
    """Return the letter that the kernel has for the state of a process; empty after its end."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program comes before, in parentheses, and may have some of its own.
            return file.read().rpartition(")")[2].split(maxsplit=1)[0]
    except (OSError, IndexError):
        return ""
