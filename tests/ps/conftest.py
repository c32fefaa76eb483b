"""Clusters in threads, with the short times of tests."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite import ps
from hvdlite.ps.cluster import enrolment
from hvdlite.ps.layouts import blocks
from hvdlite.ps.scheduler import scheduler
from hvdlite.ps.server import server
from hvdlite.ps.worker import worker
from tests.limits import patient
from tests.ps.cluster import Cluster
from tests.ps.sites import Site

PACKAGE = str(Path(ps.__file__).parent)
END_SECONDS = patient(10.0)  # For what ends by itself, such as a thread that has met nobody.


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Fail where the parameter server leaves threads, its own ones or others that wait in it."""
    before = set(threading.enumerate())
    yield
    limit = time.monotonic() + END_SECONDS
    own = [each for each in _in_package() if each not in before]
    for thread in own:
        thread.join(max(0.0, limit - time.monotonic()))
    left = {each.name: places for each, places in _in_package().items() if each in own}
    assert not left, f"threads are left, with where they are: {left}"


def _in_package() -> dict[threading.Thread, list[str]]:
    """Return the threads that are in the package, and where."""
    found, frames = {}, sys._current_frames()
    for thread in threading.enumerate():
        frame, places = frames.get(thread.ident or 0), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            frame = frame.f_back
        if places:
            found[thread] = places
    return found


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """This host, for processes."""
    return Site(tmp_path)


@pytest.fixture
def new_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes a cluster of so many servers and workers."""
    monkeypatch.setattr(enrolment, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(scheduler, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(worker, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1700)  # Two parts: servers have several blocks.
    made: list[Cluster] = []

    def new(servers: int, workers: int, **words: Any) -> Cluster:
        folder = tmp_path / words.pop("folder", "")
        folder.mkdir(exist_ok=True)
        made.append(Cluster(folder, servers, workers, **words))
        return made[-1]

    yield new
    for cluster in made:
        cluster.close()
