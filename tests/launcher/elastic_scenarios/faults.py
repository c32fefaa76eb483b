"""What happens to the workers of a job, and where: the test says it in a variable.

FAULTS is a list in JSON. Each fault names a worker, a place, the step from which it may happen, how
often the place is passed before, and what to do there: "kill", "stop", "raise", "exit",
"raise slowly" for a process that ends only after others have gone on, or "hosts ..." for what
discovery shows then.

A worker's name is its first rank if it is one of the first workers (their numbers are in the order
in which hosts come up), and its number if it came later.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdlite.common.collectives.between_hosts.pipeline import RingRun
from hvdlite.common.collectives.native.collectives import NativeShm
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.driver_link.link import DriverLink
from hvdlite.common.engine.control_plane import ControlPlane
from hvdlite.common.transport.tcp import connect
from tests.limits import patient

NUMBER = int(os.environ["HVDLITE_WORKER"])
IS_FIRST = int(os.environ["FIRST_WORKERS"]) > NUMBER
NAME = int(os.environ["HVDLITE_RANK"]) if IS_FIRST else NUMBER
HOSTS = os.environ.get("SCENARIO_HOSTS", "")  # The file that the discovery script prints.
LONGEST_END_SECONDS = patient(20.0)
NATIVE_SECONDS = 0.001  # From the begin of a compiled allreduce to the death in it.

_lock = threading.Lock()  # Guards all that follows: engine and script pass places at once.
_faults: list[dict[str, Any]] = [
    {"step": 0, "skip": 0, "do": "kill", **fault}
    for fault in json.loads(os.environ.get("FAULTS", "[]"))
    if fault["worker"] == NAME
]
_now = {"step": 0}


def say(**words: Any) -> None:
    """Write a line of JSON, whole, also if this process dies at once."""
    line = json.dumps({"number": NUMBER, "time": time.monotonic(), **words})
    sys.stdout.flush()
    os.write(1, line.encode() + b"\n")


def at_step(step: int) -> None:
    """Note that this worker is at a step."""
    _now["step"] = step


def at(place: str) -> None:
    """Suffer what is to happen at a place."""
    with _lock:
        passing = [fault for fault in _faults if fault["place"] == place]
        for fault in [each for each in passing if _now["step"] >= each["step"]]:
            fault["skip"] -= 1
            if fault["skip"] < 0:
                _faults.remove(fault)
                _suffer(place, fault["do"])


def _suffer(place: str, what: str) -> None:
    say(fault=place, worker=NAME, step=_now["step"], do=what)
    if what == "kill":
        if place == "native shm":
            threading.Timer(NATIVE_SECONDS, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "raise slowly":
        atexit.register(_wait_for_others)
        raise ValueError(f"a fault at {place}")
    elif what == "raise":
        raise ValueError(f"a fault at {place}")
    elif what == "exit":
        sys.exit(0)
    else:
        kind, *lines = what.split()
        assert kind == "hosts", what
        new = Path(f"{HOSTS}.{NUMBER}")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(HOSTS)


def go_on() -> None:
    """Let a worker end that has raised slowly."""
    Path(f"{HOSTS}.went_on").touch()


def _wait_for_others() -> None:
    deadline = time.monotonic() + LONGEST_END_SECONDS
    while not Path(f"{HOSTS}.went_on").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    say(unwound=NUMBER)


def _before(owner: Any, name: str, place: str) -> None:
    """Pass a place before each call of a function."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        at(place)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def install() -> None:
    """Have the places inside hvdlite passed."""
    _before(DriverLink, "wait_for_world", "in init")
    _before(connect, "exchange_versions", "meeting")
    _before(connect, "Connections", "mesh building")
    _before(connect, "_connect_neighbours", "connecting")
    _before(ControlPlane, "report", "negotiation")
    _before(ShmBackend, "_await", "shm")  # Once in a step of the pipeline, of so many bytes.
    _before(NativeShm, "_run", "native shm")
    _before(RingRun, "_receive", "ring")


install()
