"""Compiles C++ that makes hvdlite faster once on a machine, into the user's compile cache.

The ranks of a host, and hosts that share the cache, may all come here at the same time: one
compiles, the others wait for it. Nothing needs what is compiled here.

A failure is remembered, so that not every rank of every job waits for the compiler: one whose
message is about the source for a day, an accident (a full disk, a killed compiler) for a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hvdlite.common.collectives.native.cache import BuildError, Cache, opened
from hvdlite.common.collectives.native.compiler import (
    COMPILERS,
    FLAGS,
    CompilerError,
    compile_library,
    find_compiler,
)

log = logging.getLogger("hvdlite")

Loaded = TypeVar("Loaded")

SOURCE_FAILURE_SECONDS = 24 * 3600
ACCIDENT_SECONDS = 60  # so long that the ranks of one job need not all try
_FORMAT = "library and sha256"  # of the files, see `cache`
_AT_A_LINE = re.compile(r"^\S+:\d+(:\d+)?: (fatal )?error: ", re.MULTILINE)
_ACCIDENT = re.compile(
    r"error writing|no space left|cannot allocate|out of memory|memory exhausted|disk quota"
    r"|killed|terminated signal|signal terminated|read-only file system|input/output error",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Recipe:
    """What is compiled, and how."""

    source: Path
    folder: str  # of the cache
    name: str
    parts: tuple[Path, ...] = ()  # further sources, and headers of our own
    flags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()  # flags that come after the source
    depends_on: tuple[str, ...] = ()  # what else makes another file of it
    remark: str = ""  # said when it is compiled
    module: str = ""  # `python -m module` compiles it again after a failure

    def load(
        self, open_library: Callable[[str], Loaded], *, may_compile: bool = True
    ) -> Loaded | None:
        """Return `open_library(path)` of the library; None if it is not there and may not be made.

        The path is valid during the call only, and nobody else can change what it leads to. Raises
        `BuildError`, also for whatever `open_library` raises.
        """

        def opened_there(cache: Cache, name: str) -> Loaded:
            try:
                return open_library(cache.loadable(name))
            except Exception as error:
                text = str(error).replace(cache.loadable(name), name)
                raise BuildError(f"{cache.path(name)} cannot be loaded: {text}") from None

        return self._use(opened_there, may_compile, try_again=False)

    def compile_once(self, *, try_again: bool = False) -> Path:
        """Compile the library if it is not there. Return its path, for messages only.

        What has failed before fails again at once, unless you `try_again`, the compiler is another
        or the failure was long ago. Raises `BuildError`.
        """
        path = self._use(Cache.path, True, try_again)
        assert path is not None
        return path

    def _use(
        self, use: Callable[[Cache, str], Loaded], may_compile: bool, try_again: bool
    ) -> Loaded | None:
        """Return `use(cache, name)` of the library, while its folder is open; None without one."""
        name = self.file_name()
        with opened(self.folder) as cache:
            if cache is not None and cache.has_library(name):
                return use(cache, name)
        if not may_compile:
            return None
        compiler = find_compiler()
        if compiler is None:
            given = os.environ.get("CXX", "").strip()
            missing = f"$CXX ({given})" if given else f"C++ compiler ({', '.join(COMPILERS)})"
            raise BuildError(f"there is no {missing} here")
        with opened(self.folder, create=True) as cache:
            assert cache is not None
            self._compile_if_absent(cache, compiler, try_again)
            return use(cache, name)

    def file_name(self) -> str:
        """Return another name for everything that the compiled file depends on."""
        try:
            texts = [path.read_text() for path in (self.source, *self.parts)]
        except OSError as error:
            raise BuildError(
                f"this installation of hvdlite is not complete: {error}; install it again"
            ) from None
        parts = [
            *texts,
            _FORMAT,
            *FLAGS,
            *self.flags,
            *self.libraries,
            *self.depends_on,
            *platform.libc_ver(),
            platform.machine(),
        ]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return f"{self.name}-{digest}.so"

    def _compile_if_absent(self, cache: Cache, compiler: list[str], try_again: bool) -> None:
        name = self.file_name()
        with cache.locked(f"{name}.lock", self.source.name):
            if cache.has_library(name):  # another process has made it meanwhile
                return
            by = _identity(compiler)
            failed = f"{name}.failed"
            if not try_again:
                self._refuse_if_it_failed(cache, failed, by)
            if self.remark:
                log.warning("compiling %s %s", self.source.name, self.remark)
            parts = [path for path in self.parts if path.suffix == self.source.suffix]
            try:
                body = compile_library(compiler, [self.source, *parts], self.flags, self.libraries)
            except CompilerError as error:
                cache.write(failed, f"{by}\n\n{error}\n".encode(errors="backslashreplace"))
                text = f"{by} cannot compile {self.source}: {_gist(str(error))}"
                raise BuildError(f"{text}; see {cache.path(failed)}") from None
            cache.write_library(name, body)
            cache.remove(failed)

    def _refuse_if_it_failed(self, cache: Cache, failed: str, by: str) -> None:
        """Raise `BuildError` where this compiler has failed, and not too long ago."""
        said = (cache.read(failed) or b"").decode(errors="replace")
        if not said.startswith(f"{by}\n"):
            return
        # It will come again where the compiler names a line, and no accident.
        about_the_source = _AT_A_LINE.search(said) and not _ACCIDENT.search(said)
        lasts = SOURCE_FAILURE_SECONDS if about_the_source else ACCIDENT_SECONDS
        if cache.age_seconds(failed) >= lasts:
            return
        waits = f"{lasts // 3600} hours" if lasts >= 3600 else f"{lasts} seconds"
        advice = f"'python -m {self.module}' tries at once" if self.module else "or remove it"
        raise BuildError(
            f"{by} could not compile {self.source} earlier: {_gist(said)}; see "
            f"{cache.path(failed)}; tried again {waits} after the failure, {advice}"
        )


def main(recipe: Recipe, what: str) -> int:
    """Run the command that compiles `what` before a job needs it; return the exit code."""
    argparse.ArgumentParser(description=what).parse_args()
    start = time.monotonic()
    try:
        path = recipe.compile_once(try_again=True)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path} ({time.monotonic() - start:.1f} seconds)")
    return 0


def say_that_python_runs(what: str, error: BuildError, *, first_of_host: bool) -> None:
    """Log that `what` runs in Python: as a warning, by one rank of a host, where a compiler is.

    Without a compiler nothing else was to be expected.
    """
    loud = first_of_host and find_compiler() is not None
    log.log(
        logging.WARNING if loud else logging.INFO, "%s in Python, which costs time: %s", what, error
    )


def _identity(compiler: list[str]) -> str:
    """Return what tells one compiler from another: the first line of what it says of itself."""
    try:
        said = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    return f"{shlex.join(compiler)} ({said.partition(chr(10))[0].strip()})"


def _gist(said: str) -> str:
    """Return the line of a compiler's output that says most: its first error, or the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[-1] if lines else "no output")
