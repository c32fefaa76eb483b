"""The compiled operations of graphs, built and loaded once, if they are wanted.

They only make graphs faster. Some ranks of a job may have them and others not: the messages between
ranks, and the results, are the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import tensorflow as tf

from hvdlite.common.collectives.native.build import Recipe, say_that_python_runs
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.common.runtime.current import find
from hvdlite.common.settings.config import Config
from hvdlite.tf.native.graph_ops import serve
from hvdlite.tf.native.library import Library


def recipe() -> Recipe:
    """Return the recipe of the compiled operations for this TensorFlow."""
    return Recipe(
        source=Path(__file__).with_name("ops.cc"),
        folder="tf",
        name=f"ops-{tf.version.VERSION}",
        flags=("-O2", *tf.sysconfig.get_compile_flags()),
        libraries=tuple(tf.sysconfig.get_link_flags()),
        depends_on=(tf.version.GIT_VERSION,),
        remark=f"for TensorFlow {tf.version.VERSION}, once (some 10 seconds of CPU time)",
        module="hvdlite.tf.build",
    )


@dataclass
class _State:
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards the others
    library: Library | None = None
    failure: BuildError | None = None


_state = _State()


def library() -> Library | None:
    """Return the compiled operations, or None if graphs shall call Python.

    HVDLITE_TF_NATIVE is "off", "on" (raises `BuildError` if they cannot be built), or "auto": use
    them if they can be built. They are compiled now if they never were; for one rank alone only
    with "on".
    """
    wanted = Config.from_environ().tf_native
    if wanted == "off":
        return None
    with _state.lock:
        if _state.library is None and _state.failure is None:
            _load(insist=wanted == "on")
        if wanted == "on" and _state.failure is not None:
            raise BuildError(str(_state.failure))
        return _state.library


def _load(insist: bool) -> None:
    runtime = find()
    several = runtime is not None and runtime.topology.size > 1
    try:
        _state.library = recipe().load(_open, may_compile=insist or several)
    except BuildError as error:
        _state.failure = error
        first = runtime is None or runtime.topology.local_rank(runtime.rank) == 0
        say_that_python_runs("every collective of a graph runs", error, first_of_host=first)


def _open(path: str) -> Library:
    opened = Library(path)
    threading.Thread(target=serve, args=(opened,), name="hvdlite-tf", daemon=True).start()
    opened.serve()
    return opened
