"""Keys of a terminal that a shell gives to one job after the other."""

from __future__ import annotations

import sys

from tests.launcher.top import shell
from tests.launcher.top.terminal import terminal


def test_foreground_and_background() -> None:
    """See shell.py."""
    with terminal([sys.executable, shell.__file__]) as screen:
        text = screen.wait_for("all is well|Error.*", shell.LIMIT_SECONDS + 20)
        assert screen.wait() == 0, text
