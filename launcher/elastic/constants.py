"""The texts by which tools written for Horovod know how an elastic job has ended."""

from __future__ import annotations

from hvdlite.launcher.elastic.decisions.driver import RESET_LIMIT_EXCEEDED

RESET_LIMIT_EXCEEDED_MESSAGE = RESET_LIMIT_EXCEEDED  # format(limit) gives the text.
