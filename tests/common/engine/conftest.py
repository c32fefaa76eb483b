"""Fixtures for tests of the engine."""

from __future__ import annotations

import pytest

from hvdlite.common.collectives.native import short_call
from tests.short_calls import LIMIT_SECONDS


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait long for each other before they turn to the coordinator."""
    monkeypatch.setattr(short_call, "TIMEOUT_SECONDS", LIMIT_SECONDS)
