"""Forked children, which hold what their parent has opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def living_child(begin: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Fork a child that calls `begin`, and lives until the block ends."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        begin()
        os.write(ready[1], b"r")
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        yield
    finally:
        for end in (*ready, *done):
            os.close(end)
        os.waitpid(child, 0)
