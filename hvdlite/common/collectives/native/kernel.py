"""The kernel: C++ for collectives inside a host; its sources, and the variants of it in wheels.

A wheel has one library for each variant, and `candidates` says which of them a processor can run.
All of them add in the same order and round alike: the same bits, but for what a sum of several NaNs
keeps of them.

setup.py loads this file by its path: it imports no hvdlite.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SHIPPED = "shipped"  # the folder with the libraries of a wheel
# A fused multiply-add would round once where numpy rounds twice.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-strict-aliasing")
# A wheel shall be small, and need no library but C's.
SHIPPED_FLAGS = (*FLAGS, "-s", "-Wl,--as-needed")
CPU_INFO = Path("/proc/cpuinfo")
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}  # by the name that the kernel of the system says


class Variant(NamedTuple):
    """One way to compile the kernel for a wheel, and the processors that can run it."""

    name: str
    title: str  # for messages
    base: str  # what the compiler may use on every processor of this kind
    features: tuple[str, ...] = ()  # words of /proc/cpuinfo, which are also words of the compiler

    @property
    def flags(self) -> tuple[str, ...]:
        return (*SHIPPED_FLAGS, f"-march={self.base}", *(f"-m{word}" for word in self.features))


# By machine, the fastest first; the last one runs on every processor of the kind.
VARIANTS = {
    "x86_64": (
        Variant(
            "avx512", "AVX-512", "x86-64",
            ("avx2", "f16c", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        ),
        Variant("avx2", "AVX2", "x86-64", ("avx2", "f16c")),
        Variant("baseline", "any x86-64", "x86-64"),
    ),
    "aarch64": (Variant("baseline", "any aarch64", "armv8-a"),),
}  # fmt: skip


def sources() -> list[Path]:
    """Return what the compiler compiles."""
    return sorted(FOLDER.glob("*.cc"))


def headers() -> list[Path]:
    """Return what the sources include."""
    return sorted(FOLDER.glob("*.h"))


@functools.cache
def digest() -> str:
    """Return 16 hexadecimal digits that name the content of the sources and headers."""
    files = hashlib.sha256()
    for path in (*sources(), *headers()):
        files.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return files.hexdigest()[:16]


def file_name(machine: str, variant: Variant) -> str:
    """Return the name of a library in a wheel, which only the sources beside it give."""
    return f"kernel-{machine}-{variant.name}-{digest()}.so"


def candidates(machine: str, features: Collection[str]) -> list[Variant]:
    """Return the variants that a processor with these words can run, the fastest first."""
    words = set(features)
    return [each for each in VARIANTS.get(machine, ()) if words.issuperset(each.features)]


def processor_features() -> frozenset[str]:
    """Return the words of this processor's features; none where the system does not say them."""
    try:
        with CPU_INFO.open(errors="replace") as lines:
            line = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def is_library_for(machine: str, library: bytes) -> bool:
    """Return whether the content of a file is a 64-bit library for this machine."""
    is_64_bit = library[:5] == b"\x7fELF\x02"
    return is_64_bit and int.from_bytes(library[18:20], "little") == _ELF_MACHINES.get(machine)
