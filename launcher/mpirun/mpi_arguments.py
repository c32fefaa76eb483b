"""What the user tells mpirun or srun by --mpi-args and --binding-args."""

from __future__ import annotations

from collections.abc import Sequence

# Flags of mpirun and srun that bind ranks to cores.
BINDING_FLAGS = {"bind-to", "bind", "bind-to-core", "bind-to-socket", "cpu-bind", "cpu_bind"}
# Flags of mpirun that say which rank runs where.
MAPPING_FLAGS = {"map-by", "rank-by", "ppr", "npernode", "N", "npersocket", "pernode", "rankfile",
                 "rf", "bynode", "byslot", "host", "H", "hosts", "hostfile", "machinefile", "f",
                 "ppn", "perhost", "grr", "rr"}  # fmt: skip


def flags_in(arguments: Sequence[str]) -> set[str]:
    """Return the names of the flags among `arguments`, without dashes and values."""
    return {word.lstrip("-").partition("=")[0] for word in arguments if word.startswith("-")}


def places_ranks(arguments: Sequence[str]) -> bool:
    """Return whether `arguments` say which rank runs where."""
    return bool(flags_in(arguments) & MAPPING_FLAGS)


def binds_ranks(arguments: Sequence[str]) -> bool:
    """Return whether `arguments` bind each rank to cores of its own."""
    values = " ".join(arguments).replace("=", " ").split()
    return bool(flags_in(arguments) & BINDING_FLAGS) and "none" not in values
