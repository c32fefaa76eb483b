"""Fixtures for tests of the engine."""

from __future__ import annotations

import pytest

from hvdlite.common.collectives.native import short_call
from hvdlite.common.engine import engine
from hvdlite.common.engine.inbox import Inbox, _Engine
from hvdlite.common.requests.entries import Entry
from tests.short_calls import LIMIT_SECONDS


class _LongGathering(Inbox):
    """An inbox whose entries wait for a thread that waits, also while the engine is awake.

    Otherwise an engine that still looks at a message takes what was about to be a short call.
    """

    def may_sleep(self) -> bool:
        with self._lock:
            if self._hurries:
                return super().may_sleep()
            self._engine = _Engine.ASLEEP
            return True

    def drain(self, *, everything: bool = False, gathers: bool = True) -> list[Entry]:
        with self._lock:
            if not (self._hurries or everything):
                return []
            return super().drain(everything=everything, gathers=gathers)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait long for each other before they turn to the coordinator."""
    monkeypatch.setattr(short_call, "TIMEOUT_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(engine, "Inbox", _LongGathering)
