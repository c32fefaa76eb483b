"""What tells one host from another, also where the system says little."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdlite.common.meeting import host_identity
from hvdlite.common.transport.tcp import connect


def test_a_system_without_a_boot_id_has_an_identity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sandboxes for containers such as gVisor hide parts of /proc."""
    known = host_identity.host_identity()
    monkeypatch.setattr(host_identity, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(host_identity, "NETWORK", tmp_path / "net")
    monkeypatch.setattr(connect, "THREAD_NETWORK", tmp_path / "net")
    assert host_identity.host_identity().split() == known.split()[:1]
    assert connect._machine([]) == connect._machine([])
