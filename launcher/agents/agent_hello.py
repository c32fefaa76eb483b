"""The first message of an agent, which says what it is made of."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.launcher.agents.channel import VERSION


def reason_to_refuse(hello: Mapping[str, Any], *, with_call: bool) -> str:
    """Return why an agent cannot take part, as a clause about its host; empty where it can.

    `with_call`: it is to run a function of hvdlite.run.
    """
    if hello["channel"] != VERSION:
        return "has another version of hvdlite: install the same on all hosts"
    theirs, ours = list(hello["python"][:2]), list(sys.version_info[:2])
    if theirs == ours or not with_call:
        return ""
    return (
        f"has Python {_dotted(theirs)}, and the function comes from Python {_dotted(ours)}: their "
        "bytecode differs, so install the same minor version"
    )


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
