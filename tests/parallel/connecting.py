"""Connects a rank of a test's job without an engine, for tests of what is below it."""

from __future__ import annotations

from hvdlite.common.plain.config import Config
from hvdlite.common.runtime import connect as runtime
from hvdlite.common.transport.base import Transport


def connect() -> Transport:
    """The transport of this rank, over what HVDLITE_TRANSPORT says."""
    return runtime.connect(None, runtime.find_launch(), Config.from_environ()).transport
