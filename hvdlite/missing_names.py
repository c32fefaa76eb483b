"""Which Horovod hvdlite is compatible with, and what a module says for names that it lacks.

Imported with hvdlite itself, so it is cheap, and imports no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

TYPE_CHECKING = False  # that of typing, which is slow to import
if TYPE_CHECKING:
    from types import FrameType

HOROVOD_VERSION = "0.28.1"  # libraries ask for it, and switch features off below it
# Horovod's packages that train models of Keras and PyTorch on Spark's data frames.
ESTIMATORS = {"common", "keras", "lightning", "tensorflow", "torch"}
NO_ESTIMATORS = (
    "estimators for Spark are not part of this version; train in a function with hvdlite.spark.run"
)


def attribute_error(module: str, name: str) -> AttributeError:
    """Return the error for an attribute that `module` lacks."""
    reason = reason_for(f"{module}.{name}")
    if not reason and "." not in module and not name.startswith("_"):
        reason = _import_for(module, name)
    text = f"module {module!r} has no attribute {name!r}"
    return AttributeError(f"{text}: {reason}" if reason else text)


def _import_for(module: str, name: str) -> str:
    """Return what to import for a name of the package `module`, of which nothing else is."""
    from importlib.util import find_spec  # Which is slow to import.

    if module != "hvdlite":
        return f"use import {module}.torch as hvd (or .tensorflow, .keras)"
    if find_spec(f"{module}.{name}"):
        return f"use import {module}.{name}"
    return f"use import {module}.torch as hvd (or .tf, .keras, .jax, .numpy)"


def with_remedy(error: ModuleNotFoundError, package: str, remedy: str) -> ModuleNotFoundError:
    """Return the error of an import that needs `package`, with what installs it.

    Where the import has failed for the lack of something else, the error stays as it is.
    """
    if error.name != package:
        return error
    return ModuleNotFoundError(f"{error}: {remedy}", name=error.name, path=error.path)


def module_getattr(module: str, **on_demand: str) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a module that imports some of its names when asked for them.

    `on_demand` has by the names of the attributes the full names of modules, or of what modules
    have: ``module:name``.
    """

    def find(name: str) -> object:
        if name not in on_demand:
            raise attribute_error(module, name)
        from importlib import import_module

        path, _, attribute = on_demand[name].partition(":")
        found: object = import_module(path)
        if attribute:
            found = getattr(found, attribute)
        vars(sys.modules[module])[name] = found
        return found

    return find


def reason_for(name: str) -> str:
    """Return why hvdlite lacks what has this full name in Horovod; empty where it has no reason."""
    _, *parts = name.split(".")
    return NO_ESTIMATORS if parts[:1] == ["spark"] and ESTIMATORS & {*parts[1:2]} else ""


def refuse_import(module: str, reason: str = "") -> None:
    """Raise ImportError if an import asks a finder for `module`; return if ``find_spec`` asks.

    A finder calls this before it returns None. Python would then raise its own
    ModuleNotFoundError, which cannot say why: this one ends with `reason`.
    """
    if not _is_import(sys._getframe(1)):
        return
    if why := reason_for(module):  # with ModuleNotFoundError, `from ... import` would lose it
        raise ImportError(f"No module named {module!r}: {why}", name=module)
    if reason:
        raise ModuleNotFoundError(f"No module named {module!r}: {reason}", name=module)


def _is_import(frame: FrameType | None) -> bool:
    """Tell who asks a finder: both ways to ask it are Python functions of importlib."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib.util":
            return False
        if frame.f_code.co_name == "_find_and_load_unlocked":
            return True
        frame = frame.f_back
    return False
