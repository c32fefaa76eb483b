"""Scripts of docs/howto that start a cluster of their own, and what they must print.

Such a script has ``<!-- script: ray -->`` (or spark) before it, and runs as ``python script.py``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.parallel.jobs import ROOT, environment

BLOCK = re.compile(
    r"<!-- script: (?P<needs>\w+) -->\n```python\n(?P<code>.*?)\n```\n"
    r"\n<!-- prints -->\n```\n(?P<prints>.*?)\n```\n",
    re.DOTALL,
)


def scripts(needs: str) -> list[tuple[str, list[str]]]:
    """Return code and lines of the scripts that need `needs`."""
    text = "".join(page.read_text() for page in sorted(ROOT.glob("docs/howto/*.md")))
    found = BLOCK.finditer(text)
    return [(m["code"], m["prints"].splitlines()) for m in found if m["needs"] == needs]


def check(code: str, lines: list[str], folder: Path) -> None:
    """Run a script; it must print all `lines`."""
    script = folder / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(
            PYSPARK_PYTHON=sys.executable, RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0"
        ),
        cwd=folder, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    missing = {*lines} - {*done.stdout.splitlines()}
    assert not missing, done.stdout + done.stderr
