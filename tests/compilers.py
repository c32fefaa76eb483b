"""Stand-ins for a C++ compiler, and a small recipe to try them with."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hvdlite.common.collectives.native.build import Recipe


class Compiler:
    """A command that takes the arguments of a compiler, and counts its calls.

    In `body`, a shell script, "$2" is the file that is to be written.
    """

    def __init__(self, directory: Path, body: str, name: str = "compiler") -> None:
        self._calls = directory / f"{name}.calls"
        self.path = directory / name
        self.path.write_text(
            f"""#!/bin/sh
if [ "$1" = --version ]; then echo "{name} 1.0"; exit; fi
echo called >> "{self._calls}"
all="$*"
while [ "$1" != -o ]; do shift; done
{body}
"""
        )
        self.path.chmod(0o700)

    @property
    def calls(self) -> int:
        """How often it was asked to compile."""
        return len(self._calls.read_text().split()) if self._calls.exists() else 0


def quick_compiler(directory: Path, *recipes: Recipe) -> Compiler:
    """Return a compiler that makes what the real one has made of these sources for the user."""
    cases = []
    for recipe in recipes:
        made = recipe.compile_once()
        ready = directory / made.name
        ready.write_bytes(made.read_bytes()[: -hashlib.sha256().digest_size])
        cases.append(f'*/{recipe.source.name}*) cp "{ready}" "$2";;')
    return Compiler(directory, f'case "$all" in {" ".join(cases)} *) exit 1;; esac', "quick")


def small_recipe(directory: Path, answer: int = 42) -> Recipe:
    """Return a recipe whose library has a function `answer`; each directory has one of its own.

    The C library takes a file for one that is loaded already if it has the same name.
    """
    source = directory / "answer.cc"
    source.write_text(f'// {directory}\nextern "C" int answer() {{ return {answer}; }}\n')
    return Recipe(source=source, folder="small", name="answer")
