"""Layouts are the shardings of JAX on a mesh with the shape of their device matrix."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.limits import HANG_SECONDS

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")

PROGRAM = """
import itertools
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from hvdlite.common.layouts.layout import Layout

devices = jax.devices()
assert len(devices) == 8
for matrix in ([8], [2, 4], [4, 2], [2, 2, 2]):
    axes = range(len(matrix))
    names = [f"axis {number}" for number in reversed(axes)]
    mesh = Mesh(np.array(devices).reshape(matrix), names)
    maps = [m for m in itertools.product([-1, *axes], repeat=2) if m[0] != m[1] or m[0] == -1]
    maps += [(pair, -1) for pair in itertools.permutations(axes, 2)]
    for tensor_map in maps:
        spec = [
            None if entry == -1 else
            tuple(f"axis {k}" for k in (entry if isinstance(entry, tuple) else [entry]))
            for entry in tensor_map
        ]
        table = NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map((16, 16))
        layout = Layout(matrix, tensor_map)
        for rank, device in enumerate(devices):
            box = tuple(piece.indices(16)[:2] for piece in table[device])
            assert layout.box((16, 16), rank) == box, (layout, rank, box)
"""


def test_named_shardings_are_layouts() -> None:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", PROGRAM]
    subprocess.run(command, env=environment, check=True, timeout=HANG_SECONDS)
