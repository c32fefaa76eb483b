"""Bridges that container and virtual machine managers make inside a host.

They lead to no other host, and often have the same address on all of them.
"""

from __future__ import annotations

import re

# The names that are usual, for hosts whose interfaces nobody has listed.
USUAL_BRIDGES = ("docker0", "podman0", "virbr0", "lxcbr0", "lxdbr0", "cni0")
BRIDGE = re.compile(
    r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}|virbr\d+.*|lxcbr\d+|lxdbr\d+|podman\d+|cni\d+"
    r"|cni-podman\d+|kube-bridge|kube-ipvs\d+|veth.*|vnet\d+"
)
