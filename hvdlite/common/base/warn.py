"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_NOT_THE_USERS = ("hvdlite", "tensorflow", "torch", "keras", "tf_keras")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and attribute it to the innermost line outside of hvdlite and the frameworks."""
    frame: FrameType | None = sys._getframe(1)
    level = 2  # 1 is the line below
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_THE_USERS:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)
