"""Connects a rank of a test's job without an engine, for tests of what is below it."""

from __future__ import annotations

import pytest

from hvdlite.common.runtime import connect as runtime
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.base import Transport


def connect(*, everyone: bool = False) -> Transport:
    """The transport of this rank, over what HVDLITE_TRANSPORT says.

    `everyone` connects each rank with all others at once, also over TCP.
    """
    with pytest.MonkeyPatch.context() as patch:
        if everyone:
            patch.setattr(runtime, "neighbours", lambda topology, rank: range(topology.size))
        return runtime.connect(None, runtime.find_launch(), Config.from_environ()).transport
