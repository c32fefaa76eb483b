"""The alive nodes of a Ray cluster as hosts of an elastic job, and their slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdlite.launcher.elastic.discovery import HostDiscovery


class RayHostDiscovery(HostDiscovery):
    """Finds the alive nodes, and how many workers each has room for in all its resources.

    A worker takes `cpus_per_slot` cores and, with `use_gpu`, `gpus_per_slot` GPUs. A host is named
    by the address of its node; a second node of one address gets a number behind it.
    """

    def __init__(
        self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float | None = None
    ) -> None:
        self._wanted = {"CPU": cpus_per_slot, "GPU": (gpus_per_slot or 1) if use_gpu else 0}
        # The alive nodes by name, as of the last look. A node keeps its name while it is alive.
        self.nodes: dict[str, Mapping[str, Any]] = {}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots of each host; one without room for a worker is left out."""
        self.look()
        slots = {name: self._room(node["Resources"]) for name, node in self.nodes.items()}
        return {name: number for name, number in slots.items() if number}

    def look(self) -> None:
        """Look which nodes are alive."""
        import ray

        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        nodes = {
            name: alive.pop(node["NodeID"])
            for name, node in self.nodes.items()
            if node["NodeID"] in alive
        }
        for node in alive.values():
            address = node["NodeManagerAddress"]
            number, name = 1, address
            while name in nodes:
                number, name = number + 1, f"{address}#{number + 1}"
            nodes[name] = node
        self.nodes = nodes

    def _room(self, resources: Mapping[str, float]) -> int:
        rooms = [resources.get(name, 0) // each for name, each in self._wanted.items() if each]
        return int(min(rooms, default=0))
