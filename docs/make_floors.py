"""Writes the table of packages in docs/architecture.md: python docs/make_floors.py"""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- floors -->\n", "<!-- end of floors -->\n"
LAUNCHER = """\
The launcher lies in `launcher/` and is imported as `hvdlite.launcher`. It starts ranks and is none,
so it imports only {}."""


def table() -> str:
    """Return the table from top to bottom, and the sentence on what the launcher imports."""
    tests = runpy.run_path(str(ROOT / "tests" / "test_floors.py"))
    lines = ["| packages | what is in them |", "|---|---|"]
    for packages in tests["FLOORS"]:
        names = "<br>".join(f"`{name.removeprefix('hvdlite.')}`" for name in packages)
        summaries = "<br>".join(summary(first_module(tests["MODULES"], name)) for name in packages)
        lines.append(f"| {names} | {summaries} |")
    own = {"hvdlite.launcher", "hvdlite.launcher.decisions"}
    imported = sorted(tests["LAUNCHER_IMPORTS"] - own)
    names = ", ".join(f"`{name.removeprefix('hvdlite.')}`" for name in imported)
    lines += ["", LAUNCHER.format(names)]
    return "\n".join(lines) + "\n"


def first_module(modules: dict[str, Path], package: str) -> Path:
    """Return the file of a package, or of its first module where it is only a folder."""
    return next(path for name, path in modules.items() if f"{name}.".startswith(f"{package}."))


def summary(path: Path) -> str:
    """Return the first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0]


def page() -> str:
    """Return the whole page with the table as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
