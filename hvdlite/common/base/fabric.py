"""Networks other than Ethernet: MPI drives them, and TCP does not use what they can."""

from __future__ import annotations

from pathlib import Path

# Devices that only libfabric or UCX drive appear here: InfiniBand, Omni-Path, EFA and usNIC
# register as the first, Slingshot as the others.
FABRIC_CLASSES = ("infiniband", "cxi", "cxi_user")


def has_fabric(classes: Path = Path("/sys/class")) -> bool:
    """Return whether this host has a network that MPI drives through libfabric."""
    for name in FABRIC_CLASSES:
        try:
            if any((classes / name).iterdir()):
                return True
        except OSError:
            continue
    return False
