"""Sphinx: docs/ and the API reference as HTML. `nox -s docs` builds it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hvdlite import __version__

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/hvdlite/hvdlite/blob/main"

project = "hvdlite"
author = "The hvdlite developers"
copyright = f"2026, {author}"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["README.md"]  # index.md includes it
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"hvdlite {version}"
html_theme_options = {"source_repository": "https://github.com/hvdlite/hvdlite"}
default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "exclude-members": "HorovodInternalError, ProcessSet",  # of all packages: api/shared.md
}

_LINK = re.compile(r"(?<=\]\()(?!#|[a-z]+:)(?P<path>[^()#\s]+)(?P<anchor>#[^()\s]*)?(?=\))")


def complete_links(app: Any, name: str, source: list[str]) -> None:
    """Let links to what is no page lead into the repository: source files, the README, folders."""
    page = ROOT / "docs" / f"{name}.md"

    def complete(link: re.Match[str]) -> str:
        target = (page.parent / link["path"]).resolve()
        if target == ROOT / "docs" / "README.md":
            target = ROOT / "docs" / "index.md"
        inside = target.is_relative_to(ROOT / "docs")
        if inside and target.suffix in {".md", ".png"}:
            return str(link[0]).replace("README.md", "index.md")
        return f"{REPOSITORY}/{target.relative_to(ROOT)}{link['anchor'] or ''}"

    source[0] = _LINK.sub(complete, source[0])


def escape_stars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep stars of signatures in docstrings (`*args`) from opening an emphasis."""
    lines[:] = [re.sub(r"(?<![*`\\])\*(?=[a-z])", r"\\*", line) for line in lines]


def setup(app: Any) -> None:
    """Connect what is above."""
    app.connect("source-read", complete_links)
    app.connect("include-read", lambda app, path, name, text: complete_links(app, name, text))
    app.connect("autodoc-process-docstring", escape_stars)
