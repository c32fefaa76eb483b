"""Tests of ranks that an mpirun starts."""

from __future__ import annotations

import os

import pytest

from hvdlite.launcher.mpirun.mpi import OPENMPI, find_all

USED = next(find_all(os.environ), None)
with_openmpi = pytest.mark.skipif(
    USED is None or USED.kind != OPENMPI, reason="asks what Open MPI alone does"
)
