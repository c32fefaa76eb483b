"""The frames of a traceback or a stack that tell a user something: those of the script.

An error that hvdlite raises says all in its text, and the frames between the call and the `raise`
are those of another program for its reader. Frames of an error that nobody has raised on purpose
are those of a mistake in hvdlite, and stay.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from types import FrameType, TracebackType

OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBRARIES = ("site-packages", "dist-packages")  # The second one is Debian's.
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
FROZEN = "<frozen"  # Modules of the standard library that the interpreter holds itself.


def is_own(filename: str) -> bool:
    """Return whether a file is one of hvdlite."""
    return filename.startswith(OWN_FOLDER + os.sep)


def _is_of_python(filename: str) -> bool:
    installed = any(folder in filename for folder in LIBRARIES)
    return filename.startswith((STANDARD_LIBRARY + os.sep, FROZEN)) and not installed


def is_of_user(filename: str) -> bool:
    """Return whether a file belongs neither to hvdlite nor to a library, be it Python's own."""
    installed = any(folder in filename for folder in LIBRARIES)
    return not (is_own(filename) or _is_of_python(filename) or installed)


def call_of_user(frames: Sequence[FrameType]) -> str:
    """Return the innermost line of the user among the frames of a thread, the innermost first."""
    frame = next((each for each in frames if is_of_user(each.f_code.co_filename)), frames[-1])
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{file}, line {line}, in {frame.f_code.co_name}" + (f": {text}" if text else "")


def is_in_gradients(frames: Sequence[FrameType]) -> bool:
    """Return whether a thread with these frames exchanges gradients, such as in an optimizer."""
    files = (frame.f_code.co_filename for frame in frames)
    return any(is_own(file) and "gradient" in file.removeprefix(OWN_FOLDER) for file in files)


def stack_of_user(frame: FrameType) -> str:
    """Return the stack of a thread down to the call of hvdlite in which it waits, if in any."""
    frames = [frame]
    while (outer := frames[-1].f_back) is not None:
        frames.append(outer)
    files = [each.f_code.co_filename for each in frames]  # The innermost first.
    waits = next(
        (n for n, each in enumerate(files) if not (is_own(each) or _is_of_python(each))), len(files)
    )
    own = [number for number, file in enumerate(files[:waits]) if is_own(file)]
    shown = frames[own[-1] + 1] if own and own[-1] + 1 < len(frames) else frame
    return "".join(traceback.format_stack(shown))


def main_thread_stack() -> str:
    """Return the Python stack of the main thread of this process, down to its call of hvdlite."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = stack_of_user(frame) if frame else "(no main thread)\n"
    return stack.encode(errors="backslashreplace").decode()  # paths need not be UTF-8


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
    if not users or not own or own[-1] < users[-1]:
        return steps[0]
    line = linecache.getline(files[own[-1]], steps[own[-1]].tb_lineno)
    if line.split(maxsplit=1)[:1] != ["raise"]:  # It is a mistake in hvdlite.
        return steps[0]
    kept = steps[: next(number for number in own if number > users[-1])]
    shown: TracebackType | None = None
    for step in reversed(kept):
        shown = TracebackType(shown, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return shown
