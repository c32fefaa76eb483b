"""The networks of this machine: its interfaces, bridges inside it, and fabrics that MPI drives."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

# Devices that only libfabric or UCX drive appear here: InfiniBand, Omni-Path, EFA and usNIC
# register as the first, Slingshot as the others.
FABRIC_CLASSES = ("infiniband", "cxi", "cxi_user")
# Bridges that container and virtual machine managers make inside a host. They lead to no other
# host, and often have the same address on all of them.
BRIDGE = re.compile(
    r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}|virbr\d+.*|lxcbr\d+|lxdbr\d+|podman\d+|cni\d+"
    r"|cni-podman\d+|kube-bridge|kube-ipvs\d+|veth.*|vnet\d+"
)
# The names that are usual, for hosts whose interfaces nobody has listed.
USUAL_BRIDGES = ("docker0", "podman0", "virbr0", "lxcbr0", "lxdbr0", "cni0")
UP, LOOPBACK = 0x1, 0x8  # IFF_UP, IFF_LOOPBACK


def has_fabric(classes: Path = Path("/sys/class")) -> bool:
    """Return whether this host has a network that MPI drives through libfabric."""
    for name in FABRIC_CLASSES:
        try:
            if any((classes / name).iterdir()):
                return True
        except OSError:
            continue
    return False


# The interfaces, as getifaddrs() of the C library lists them.


class Interface(NamedTuple):
    """One address of an interface; an interface with several addresses is listed several times."""

    name: str
    address: str
    prefix: int  # Bits of the address that name its subnet.
    up: bool = True
    loopback: bool = False
    scope: int = 0  # The index of the interface, for a link-local address of IPv6; else 0.


class _Address(ctypes.Structure):
    """``struct ifaddrs`` of the C library."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("mask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]
_libc = ctypes.CDLL(None, use_errno=True)
_libc.freeifaddrs.argtypes = (ctypes.c_void_p,)
_libc.freeifaddrs.restype = None


def list_interfaces() -> list[Interface]:
    """Return all addresses of IPv4 and IPv6, in the order of the interfaces. Raises `OSError`."""
    first = ctypes.POINTER(_Address)()
    if _libc.getifaddrs(ctypes.byref(first)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    found, entry = [], first
    try:
        while entry:
            interface = _read(entry.contents)
            if interface is not None:
                found.append(interface)
            entry = entry.contents.next
    finally:
        _libc.freeifaddrs(first)
    return found


def _read(entry: _Address) -> Interface | None:
    """Return the entry, or None if its address is none of IPv4 or IPv6."""
    raw = _ip_of(entry.address)
    if raw is None:
        return None
    mask = _ip_of(entry.mask) or b""
    address = ipaddress.ip_address(raw)
    name = os.fsdecode(entry.name)
    link_local = address.version == 6 and address.is_link_local
    return Interface(
        name,
        str(address),
        sum(byte.bit_count() for byte in mask) or len(raw) * 8,
        bool(entry.flags & UP),
        bool(entry.flags & LOOPBACK),
        socket.if_nametoindex(name) if link_local else 0,
    )


def _ip_of(pointer: int | None) -> bytes | None:
    """Return the address in a ``struct sockaddr``, or None if it is none of IPv4 or IPv6."""
    if not pointer:
        return None
    family = ctypes.c_ushort.from_address(pointer).value
    if family == socket.AF_INET:
        return ctypes.string_at(pointer + 4, 4)  # After family and port.
    if family == socket.AF_INET6:
        return ctypes.string_at(pointer + 8, 16)  # After family, port and flow.
    return None
