"""What makes loading hvdlite quicker."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Within this, garbage is not collected, for imports: they make none.

    The objects that a framework has just made are due for a full collection, which takes 90 ms, and
    every one of them is still needed.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
