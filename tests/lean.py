"""Lets frameworks start in half the time: scripts of the tests' ranks import this before them.

Keras looks for packages that users of its wrappers and plots need. An optimizer of PyTorch imports
the compiler in its first step, to tell it what to leave out. No script that imports this compiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

for _name in ("matplotlib", "sklearn"):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]  # Its import raises ImportError.


def _disable(
    function: Callable[..., Any] | None = None, *_: object, **__: object
) -> Callable[..., Any]:
    """Return the function as it is, or where none is given, a decorator that does so."""
    return _disable if function is None else function


_compiler = ModuleType("torch._dynamo")
_compiler.__dict__.update(
    disable=_disable, graph_break=lambda *_, **__: None,
    # Torch's own process groups forget what the compiler has noted of them.
    trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),
)  # fmt: skip
sys.modules.setdefault("torch._dynamo", _compiler)
