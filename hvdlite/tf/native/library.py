"""The compiled operations of graphs, built and loaded once, if they are wanted.

They only make graphs faster. Some ranks of a job may have them and others not: the messages between
ranks, and the results, are the same.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdlite.common.collectives.native.build import Recipe, say_that_python_runs
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.common.gradients.graph_buckets import GraphLibrary, declared
from hvdlite.common.runtime.current import find
from hvdlite.common.settings.config import Config
from hvdlite.tf.accelerators.library import Accelerator
from hvdlite.tf.errors import GENERATED
from hvdlite.tf.native.graph_ops import serve


class Library(GraphLibrary):
    """The compiled operations, and the C functions beside them."""

    def __init__(self, path: str) -> None:
        operations: Any = tf.load_op_library(path)
        self.start, self.take = _named(operations.hvdlite_start), _named(operations.hvdlite_take)
        super().__init__(path)
        quick, pointer, number = self.quick, ctypes.c_void_p, ctypes.c_int
        integers = ctypes.POINTER(ctypes.c_int64)
        self.allocate = declared(quick.hvdlite_allocate, pointer, pointer, number, number, integers)
        self.end = declared(quick.hvdlite_end, pointer, pointer, number, ctypes.c_char_p)
        self.finish = declared(self.waiting.hvdlite_finish, None, pointer)
        self._use_events = declared(quick.hvdlite_use_events, None, *[pointer] * 4)

    def use(self, accelerator: Accelerator) -> None:
        """Let graphs mark with events where tensors are ready on a device."""
        functions = map(
            accelerator.cuda.function,
            ("cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventDestroy"),
        )
        addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions]
        self._use_events(*addresses, accelerator.stream_of_host)


def _named(operation: Any) -> Any:
    """Tell what TensorFlow has generated from a script of ``python -c``, "<string>" as well."""
    generated = inspect.unwrap(operation)
    generated.__code__ = generated.__code__.replace(co_filename=GENERATED)
    return operation


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
