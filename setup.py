"""Build entry: pyproject.toml declares everything but the README, whose links are completed here.

A package index shows the README without the repository around it, so links and pictures that are
relative in README.md become addresses in the repository.
"""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/hvdlite/hvdlite"
PAGE, PICTURE = f"{REPOSITORY}/blob/main/", f"{REPOSITORY}/raw/main/"
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?!#|[a-z]+:)(?P<target>[^()\s]+)\)")


def readme() -> str:
    """Return README.md with absolute links."""

    def complete(link: re.Match[str]) -> str:
        base = PICTURE if link["picture"] else PAGE
        return f"{link['picture']}[{link['text']}]({base}{link['target']})"

    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return LINK.sub(complete, text)


setup(long_description=readme(), long_description_content_type="text/markdown")
