"""Fixtures for tests of the engine."""

from __future__ import annotations

import pytest

from hvdlite.common.collectives.native import short_call
from hvdlite.common.engine import engine
from hvdlite.common.engine.inbox import Inbox, _Engine
from hvdlite.common.plain.entries import Entry
from tests.short_calls import LIMIT_SECONDS


class _LongGathering(Inbox):
    """An inbox whose entries wait for a thread that waits, also while the engine is awake.

    Otherwise an engine that still looks at a message takes what was about to be a short call.
    """

    _hurried = False

    def hurry(self) -> None:
        with self._lock:
            self._hurried = self._hurried or bool(self._entries)
        super().hurry()

    def may_sleep(self) -> bool:
        with self._lock:
            if self._hurried:
                return super().may_sleep()
            self._engine = _Engine.ASLEEP
            return True

    def drain(self, *, everything: bool = False) -> list[Entry]:
        with self._lock:
            hurried, self._hurried = self._hurried or everything, False
            return super().drain(everything=everything) if hurried else []


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait long for each other before they turn to the coordinator."""
    monkeypatch.setattr(short_call, "TIMEOUT_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(engine, "Inbox", _LongGathering)
