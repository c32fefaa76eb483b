"""The scripts of some pages (`PAGES`) run on two ranks, and print what the pages say.

A block of code that is a whole script has ``<!-- run: what it needs -->`` before it; the block that
follows ``<!-- prints -->`` has lines that it must print. Scripts that need other libraries run
with ``-m libraries`` only.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launcher.jobs import LAUNCHER
from tests.parallel.jobs import MPIRUN, NO_MPIRUN, ROOT, run_command

PAGES = [
    *sorted(ROOT.glob("docs/howto/*.md")),
    ROOT / "docs" / "checkpoints.md",
    ROOT / "docs" / "libraries.md",
    ROOT / "docs" / "sharding.md",
]
BLOCK = re.compile(
    r"<!-- run: (?P<needs>[^>]*) -->\n```python\n(?P<code>.*?)\n```\n"
    r"(?:\n<!-- prints -->\n```\n(?P<prints>.*?)\n```\n)?",
    re.DOTALL,
)
# Modules of the extras "torch" and "test"; all others belong to the extra "libraries".
QUICK = {"numpy", "rich", "safetensors", "torch"}
ALIAS = "alias"  # under the name horovod


@dataclass(frozen=True)
class Script:
    """A block of code of a page."""

    name: str
    needs: frozenset[str]
    code: str
    prints: tuple[str, ...]


def scripts() -> list[Script]:
    found = []
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text()), 1):
            needs = frozenset(word.strip() for word in match["needs"].split(","))
            prints = tuple((match["prints"] or "").splitlines())
            found.append(Script(f"{page.stem}-{number}", needs, match["code"], prints))
    return found


SCRIPTS = scripts()


def parameters(scripts: list[Script]) -> list[object]:
    other = pytest.mark.libraries
    quick = [script.needs - {ALIAS} <= QUICK for script in scripts]
    return [
        pytest.param(script, id=script.name, marks=[] if is_quick else other)
        for script, is_quick in zip(scripts, quick, strict=True)
    ]


@pytest.mark.scripts
@pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN)
@pytest.mark.parametrize("script", parameters(SCRIPTS))
def test_a_script_prints_what_the_page_says(script: Script, tmp_path: Path) -> None:
    for module in script.needs - {ALIAS}:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    path = tmp_path / "train.py"
    path.write_text(script.code + "\n")
    flags = ["--as-horovod"] if ALIAS in script.needs else []
    words = ["/bin/sh", "-c", f'cd "{tmp_path}" && exec "{sys.executable}" train.py']
    done = run_command([*LAUNCHER, *flags, "-np", "2", *words], timeout=220)
    assert done.returncode == 0, done.stdout
    lines = {line.split(">:", 1)[-1] for line in done.stdout.splitlines()}
    assert set(script.prints) <= lines, done.stdout


def test_no_script_is_forgotten() -> None:
    """Every block that begins a job is marked; others are parts of one, or need a person."""
    for page in PAGES:
        blocks = re.findall(
            r"(<!-- (?:run|script): .* -->\n)?```python\n(.*?)```", page.read_text(), re.DOTALL
        )
        for mark, code in blocks:
            assert mark or ".init()" not in code or "breakpoint()" in code, f"{page.name}:\n{code}"
    assert len(SCRIPTS) > 10
