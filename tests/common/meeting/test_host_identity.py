"""What tells one host from another, also where the system says little."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hvdlite.common.meeting import placement
from hvdlite.common.transport.tcp import connect


def test_a_system_without_a_boot_id_has_an_identity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sandboxes for containers such as gVisor hide parts of /proc."""
    known = placement.host_identity()
    monkeypatch.setattr(placement, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(placement, "NETWORK", tmp_path / "net")
    monkeypatch.setattr(connect, "THREAD_NETWORK", tmp_path / "net")
    assert placement.host_identity().split() == known.split()[:1]
    assert connect._machine() == connect._machine()


@pytest.mark.parametrize("part", ["its name", "its boot", "its network"])
def test_hosts_that_differ_in_one_part_are_two(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Virtual machines of one image have one name, and containers of one machine one boot."""
    boot, network = tmp_path / "boot_id", tmp_path / "net"
    boot.write_text("1\n")
    network.symlink_to("net:[1]")
    monkeypatch.setattr(placement, "BOOT_ID", boot)
    monkeypatch.setattr(placement, "NETWORK", network)
    first = placement.host_identity()
    assert placement.host_identity() == first
    if part == "its name":
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
    elif part == "its boot":
        boot.write_text("2\n")
    else:
        network.unlink()
        network.symlink_to("net:[2]")
    assert placement.host_identity() != first
