"""The compiled functions as Python calls them, built and loaded once, if they are wanted.

They only make programs faster. Some ranks of a job may have them and others not: the messages
between ranks, and the results, are the same.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import jax
import jaxlib.version

from hvdlite.common.collectives.native.build import Recipe, say_that_python_runs
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.common.gradients.graph_buckets import GraphLibrary, declared
from hvdlite.common.runtime.current import find

START, TAKE = "hvdlite_start", "hvdlite_take"


class Library(GraphLibrary):
    """The compiled functions: XLA knows those that programs call, and Python calls the others."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        waiting = self.waiting
        self.open_tickets = declared(waiting.hvdlite_open, ctypes.c_int64)
        self.unused_bytes = declared(waiting.hvdlite_unused_bytes, ctypes.c_int64)
        self.forget = declared(waiting.hvdlite_forget, None)
        self.end = declared(waiting.hvdlite_end, None, ctypes.c_void_p, ctypes.c_char_p)
        for name in (START, TAKE):
            target = jax.ffi.pycapsule(getattr(waiting, name))
            jax.ffi.register_ffi_target(name, target, platform="cpu")


def recipe() -> Recipe:
    """Return the recipe of the compiled functions for this version of XLA's interface."""
    return Recipe(
        source=Path(__file__).with_name("ops.cc"),
        folder="jax",
        name=f"ops-{jaxlib.version.__version__}",
        flags=("-O2", "-std=c++17", "-isystem", jax.ffi.include_dir()),
        remark=f"for JAX {jaxlib.version.__version__}, once (some 4 seconds of CPU time)",
        module="hvdlite.jax.build",
    )


def load() -> Library | None:
    """Load the compiled functions; None where they cannot be built. XLA takes them once."""
    try:
        return recipe().load(Library)
    except BuildError as error:
        runtime = find()
        first = runtime is None or runtime.topology.local_rank(runtime.rank) == 0
        say_that_python_runs("every collective of a program runs", error, first_of_host=first)
        return None
