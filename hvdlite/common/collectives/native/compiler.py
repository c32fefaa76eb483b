"""Finds and runs the C++ compiler. setup.py loads this file by its path: it imports no hvdlite."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
LIMIT_SECONDS = 600
FLAGS = ("-fPIC", "-shared", "-w")  # -w: what is wrong in the headers of others is not ours


class CompilerError(Exception):
    """The compiler failed; the text is its command and what it said."""


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler: $CXX, or the first that is there; None without."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    return None


def compile_library(
    compiler: Sequence[str],
    sources: Sequence[Path],
    flags: Sequence[str],
    libraries: Sequence[str] = (),
) -> bytes:
    """Compile the sources to one shared library, in a folder of its own, and return its content.

    `libraries` are flags that come after the sources. Raises `CompilerError`.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="hvdlite-") as folder:
            target = Path(folder) / "library.so"
            before = [*compiler, *FLAGS, *flags, *map(str, sources)]
            command = [*before, *libraries, "-o", str(target)]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="backslashreplace",
                timeout=LIMIT_SECONDS,
                check=False,
            )
            if done.returncode == 0:
                return target.read_bytes()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(str(error)) from None
    said = f"{done.stdout}{done.stderr}" or f"exit code {done.returncode}"
    raise CompilerError(f"{shlex.join(command)}\n{said}")
