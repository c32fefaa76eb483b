"""A job of two ranks whose `init` fails in many ways, and works after each: see test_start.py."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodVersionMismatchError
from hvdlite.common.engine import engine
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.transport import bootstrap
from tests.parallel.rank_helpers import (
    STARTED_BY_MPI,
    belongings,
    check,
    done,
    hear,
    nothing_ends,
    rank,
    say,
    wait_until,
)

Internal = hvd.HorovodInternalError
interruptions = count()
GOES_ON = None  # no call: the next init of this rank waits for that of the other
MISSING = "/nonexistent/t.json"
FIRST, SECOND, BOTH = hvd.ProcessSet([0]), hvd.ProcessSet([1]), hvd.ProcessSet([0, 1])
AGAIN, FOREIGN = hvd.ProcessSet([0]), hvd.ProcessSet([0, 7])
if STARTED_BY_MPI:
    from mpi4py import MPI

    WORLD = hvd.ProcessSet(MPI.COMM_WORLD)
else:
    WORLD = BOTH
SETS = (FIRST, SECOND, BOTH, AGAIN, FOREIGN, WORLD)


class Case(NamedTuple):
    """A call of init that fails, as this rank sees it."""

    name: str
    error: type[BaseException] | None
    text: str  # a pattern of the error
    call: Callable[[], None]
    place: AbstractContextManager[Any] = nullcontext()


def raising(error: BaseException) -> Callable[..., None]:
    """A function that raises `error`."""

    def function(*_args: object, **_options: object) -> None:
        raise error

    return function


def environment(**values: str) -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, values)


def with_sets(*sets: hvd.ProcessSet) -> Callable[[], None]:
    return lambda: hvd.init(process_sets=list(sets))


def interrupted() -> None:
    """Ctrl-C while the other rank has not come."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        hvd.init()
    finally:
        timer.join()
        say(f"interrupted {next(interruptions)}")


def comes_later() -> None:
    hear(f"interrupted {next(interruptions)}")
    raise KeyError("the other rank was interrupted")


def cases() -> Iterator[Case]:
    """All of them; what is different on rank 1 stands first."""
    one = rank == 1
    init = hvd.init
    yield Case("a duplicate", ValueError, "duplicate", with_sets(FIRST, AGAIN))
    yield Case("the set of all ranks", ValueError, "duplicate", with_sets(FIRST, BOTH))
    yield Case("a foreign rank", ValueError, "rank 7 does not exist", with_sets(FIRST, FOREIGN))
    yield Case("a duplicate on rank 1", ValueError if one else Internal, "duplicate",
               with_sets(FIRST, AGAIN) if one else with_sets(FIRST))  # fmt: skip
    yield Case("another number of sets", Internal, "rank 1 has",
               with_sets(FIRST, SECOND) if one else with_sets(FIRST))  # fmt: skip
    yield Case("a communicator on rank 1", ValueError if one else Internal, "duplicate",
               with_sets(WORLD) if one else with_sets(FIRST))  # fmt: skip
    yield Case("settings", Internal, "rank 0 has.*HVDLITE_DATA_PLANE=", init,
               environment(HVDLITE_DATA_PLANE="ring" if one else "shm"))  # fmt: skip
    said = "^init has failed on rank 0 by FileNotFound.*" if one else ""
    said += f"rank 0 cannot write the timeline.*'{MISSING}'$"
    yield Case("timeline of rank 0", Internal if one else OSError, said, init,
               environment(HVDLITE_TIMELINE=MISSING))  # fmt: skip
    path = MISSING if one else f"{os.environ['FOLDER']}/t.json"
    yield Case("timeline of rank 1", OSError if one else Internal, "/nonexistent/t.rank1", init,
               environment(HVDLITE_TIMELINE=path, HVDLITE_TIMELINE_ALL_RANKS="1"))  # fmt: skip
    yield Case("versions", HorovodVersionMismatchError,
               "install one version of hvdlite for all ranks", init,
               mock.patch.object(bootstrap, "PROTOCOL_VERSION", 90 + rank))  # fmt: skip
    broken = raising(OSError("rank 1 has no memory")) if one else engine.build_backends
    yield Case("the engine of rank 1", OSError if one else Internal, "rank 1", init,
               mock.patch.object(engine, "build_backends", broken))  # fmt: skip
    broken = raising(KeyboardInterrupt("rank 1")) if one else Runtime._agree
    yield Case("Ctrl-C in the middle", KeyboardInterrupt if one else Internal, "rank 1", init,
               mock.patch.object(Runtime, "_agree", broken))  # fmt: skip
    yield Case("Ctrl-C while waiting", KeyError if one else KeyboardInterrupt, "",
               comes_later if one else interrupted)  # fmt: skip
    yield Case("a type", ValueError if one else GOES_ON, "Invalid type",
               lambda: init("all"))  # fmt: skip
    yield Case("a setting", ValueError if one else GOES_ON, "HVDLITE_FUSION_THRESHOLD", init,
               environment(HVDLITE_FUSION_THRESHOLD="much"))  # fmt: skip
    yield Case("left out", ValueError if one else GOES_ON, "leaves out rank 1", lambda: init([0]))
    yield Case("a rank twice", ValueError, "names a rank twice", lambda: init([0, 0, 1]))


def fail(case: Case) -> None:
    """See that a call fails as it shall, and that nothing is initialised afterwards."""
    if case.error is GOES_ON:
        return
    try:
        with case.place:
            case.call()
    except BaseException as error:
        if not isinstance(error, case.error):
            raise
        assert re.search(case.text, str(error), re.DOTALL), (case.name, error)
        assert not hvd.is_initialized(), case.name
        assert [each for each in SETS if each.process_set_id is not None] == [], case.name
    else:
        raise AssertionError(f"{case.name}: init went well")


def has_only(before: object) -> bool:
    """Whether this process comes to have no other descriptors and threads than `before`."""
    return wait_until(nothing_ends) and wait_until(lambda: belongings() == before)


def main() -> None:
    """Fail in every way, twice: the first round may make what is kept for good."""
    hvd.init()
    check("first")
    hvd.shutdown()
    for _ in range(2):
        assert wait_until(nothing_ends)
        before = belongings()
        for case in cases():
            fail(case)
            assert case.error is GOES_ON or has_only(before), (case.name, before, belongings())
            hvd.init(process_sets=[FIRST])
            check(case.name)
            assert FIRST.process_set_id == 1, case.name
            hvd.shutdown()
        assert has_only(before), (before, belongings())
    done()
