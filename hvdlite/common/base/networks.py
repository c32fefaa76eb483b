"""Networks other than Ethernet: MPI drives them, and TCP does not use what they can."""

from __future__ import annotations

import re
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


# Bridges that container and virtual machine managers make inside a host.
#
# They lead to no other host, and often have the same address on all of them.


# The names that are usual, for hosts whose interfaces nobody has listed.
USUAL_BRIDGES = ("docker0", "podman0", "virbr0", "lxcbr0", "lxdbr0", "cni0")
BRIDGE = re.compile(
    r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}|virbr\d+.*|lxcbr\d+|lxdbr\d+|podman\d+|cni\d+"
    r"|cni-podman\d+|kube-bridge|kube-ipvs\d+|veth.*|vnet\d+"
)
