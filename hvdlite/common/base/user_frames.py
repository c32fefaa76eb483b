"""The frames of a traceback that tell a user something: those of the script, down to its own call.

An error that hvdlite raises says all in its text, and the frames between the call and the `raise`
are those of another program for its reader. Frames of an error that nobody has raised on purpose
are those of a mistake in hvdlite, and stay.
"""

from __future__ import annotations

import linecache
import os
import sysconfig
from types import TracebackType

OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBRARIES = ("site-packages", "dist-packages")  # The second one is Debian's.
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
FROZEN = "<frozen"  # Modules of the standard library that the interpreter holds itself.


def is_own(filename: str) -> bool:
    """Return whether a file is one of hvdlite."""
    return filename.startswith(OWN_FOLDER + os.sep)


def is_of_user(filename: str) -> bool:
    """Return whether a file belongs neither to hvdlite nor to a library, be it Python's own."""
    of_python = filename.startswith((STANDARD_LIBRARY + os.sep, FROZEN))
    installed = any(folder in filename for folder in LIBRARIES)
    return not (is_own(filename) or of_python or installed)


def without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return `traceback` up to the call of hvdlite that has raised an error on purpose.

    It is returned as it is where no frame of a user comes before, and for any other error.
    """
    steps = []
    while traceback is not None:
        steps.append(traceback)
        traceback = traceback.tb_next
    if not steps:
        return None
    files = [step.tb_frame.f_code.co_filename for step in steps]
    users = [number for number, file in enumerate(files) if is_of_user(file)]
    own = [number for number, file in enumerate(files) if is_own(file)]
    if not users or not own or own[-1] < users[-1] or not _raises(steps[own[-1]]):
        return steps[0]
    kept = steps[: next(number for number in own if number > users[-1])]
    shown: TracebackType | None = None
    for step in reversed(kept):
        shown = TracebackType(shown, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return shown


def _raises(step: TracebackType) -> bool:
    """Return whether a frame of hvdlite raises an error by a statement."""
    line = linecache.getline(step.tb_frame.f_code.co_filename, step.tb_lineno)
    return line.split(maxsplit=1)[:1] == ["raise"]
