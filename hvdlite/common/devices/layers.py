"""The two layers of members on several hosts: those of one host, and one of each host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.common.collectives.base import Members
from hvdlite.common.devices.interface import Communicator


@dataclass
class Layers:
    """The layers as one member sees them."""

    local: Members  # Those of this host.
    cross: Members  # Those with the same place in their hosts.
    communicator: Communicator | None = None  # Of `local`.


def layers_of(members: Members) -> Layers | None:
    """Return the layers; None where all hosts do not have as many members, two or more."""
    topology = members.topology
    if len(topology.hosts) == 1 or not topology.homogeneous or len(topology.hosts[0]) == 1:
        return None
    return Layers(
        _some_of(members, topology.peers(members.index)),
        _some_of(members, topology.cross_peers(members.index)),
    )


def _some_of(members: Members, positions: Sequence[int]) -> Members:
    chosen = tuple(sorted(positions))
    return Members(
        tuple(members.ranks[position] for position in chosen),
        chosen.index(members.index),
        members.topology.restrict(chosen),
    )
