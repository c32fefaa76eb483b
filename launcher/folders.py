"""The folders of one job: named pipes and temporary files, and MPI's shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdlite.launcher.mpi import OPENMPI, Mpi
from hvdlite.launcher.openmpi import parameter_given

SHARED_MEMORY = Path("/dev/shm")
# The parameters of Open MPI that say where the files of its shared memory lie.
BACKING = ("btl_sm_backing_directory", "osc_sm_backing_directory", "osc_rdma_backing_directory")
BACKING_4 = ("btl_vader_backing_directory", *BACKING[1:])

# Removes the folders when this process has gone without doing so; an mpirun that outlives it for a
# moment may put something there once more.
PATH = "/usr/local/bin:/usr/bin:/bin"
REMOVE = """
cat
for second in 1 2 3 4 5; do sleep 1; rm -rf -- "$@"; done
"""


class Folders:
    """Private folders of one job, which nobody else may enter. What lies there is the job's own."""

    def __init__(self) -> None:
        prefix = f"hvdlite-run-{os.getpid()}-"
        self.temporary = tempfile.mkdtemp(prefix=prefix)
        self.shared_memory: str | None = None  # in memory, where this system has such a place
        if SHARED_MEMORY.is_dir():
            with contextlib.suppress(OSError):
                self.shared_memory = tempfile.mkdtemp(prefix=prefix, dir=SHARED_MEMORY)
        folders = filter(None, (self.temporary, self.shared_memory))
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", REMOVE, "sh", *folders], stdin=subprocess.PIPE, env={"PATH": PATH},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
        )  # fmt: skip

    def backing_variables(
        self, mpi: Mpi, environ: Mapping[str, str], arguments: Sequence[str]
    ) -> dict[str, str]:
        """Return the variables by which Open MPI puts its shared memory into our folder.

        They are for the ranks of this host, and leave out what the user has set. Ranks that are
        killed leave their files behind, and in a folder of our own we know whose they are.
        """
        if self.shared_memory is None or OPENMPI not in (mpi.kind, mpi.library):
            return {}
        return {
            f"OMPI_MCA_{name}": self.shared_memory
            for name in (BACKING_4 if mpi.major == 4 else BACKING)
            if not parameter_given(name, environ, arguments, mpi.program)
        }

    def remove(self) -> None:
        """Remove the folders and all that is in them."""
        for folder in (self.temporary, self.shared_memory):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        self._remover.kill()
        self._remover.communicate()
