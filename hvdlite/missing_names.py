"""Which Horovod hvdlite is compatible with, and the errors for names of it that are missing.

Imported with hvdlite itself, so it is cheap, and imports no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

TYPE_CHECKING = False  # that of typing, which is slow to import
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

HOROVOD_VERSION = "0.28.1"  # libraries ask for it, and switch features off below it
ELASTIC = "elastic"
NO_ELASTIC_HERE = "elastic training is not part of this version"
# The launcher refuses the flags of elastic training with the same words.
NO_ELASTIC = f"{NO_ELASTIC_HERE}; give -np and the hosts"


def attribute_error(module: str, name: str) -> AttributeError:
    """Return the error for an attribute that `module` lacks."""
    reason = f": {NO_ELASTIC}" if name == ELASTIC else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{reason}")


def module_getattr(module: str) -> Callable[[str], NoReturn]:
    """Return a ``__getattr__`` for a module that makes no names on demand."""

    def refuse(name: str) -> NoReturn:
        raise attribute_error(module, name)

    return refuse


def is_elastic(module: str) -> bool:
    """Tell whether a module, by its full name, belongs to elastic training."""
    return ELASTIC in module.split(".")[1:]


def refuse_import(module: str, reason: str = "") -> None:
    """Raise ImportError if an import asks a finder for `module`; return if ``find_spec`` asks.

    A finder calls this before it returns None. Python would then raise its own
    ModuleNotFoundError, which cannot say why: this one ends with `reason`.
    """
    if not _is_import(sys._getframe(1)):
        return
    if is_elastic(module):  # with ModuleNotFoundError, `from ... import` would lose the sentence
        raise ImportError(f"No module named {module!r}: {NO_ELASTIC}", name=module)
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
