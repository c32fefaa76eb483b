"""Whether a step takes the memory that the step before has freed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.limits import HANG_SECONDS

PROGRAM = """
import resource
import numpy as np
from hvdlite.common.base.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(2 << 20, np.uint8) for _ in range(16)]
    del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
keep_freed_memory(NBYTES)
print([faults() for _ in range(3)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize(("nbytes", "chosen"), [(64 << 20, None), (80, None), (64 << 20, "131072")])
def test_pages_are_kept_unless_the_user_has_chosen(nbytes: int, chosen: str | None) -> None:
    """Also with few gradients: glibc must keep as much for them as it would by itself."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environ = others | ({} if chosen is None else {"MALLOC_TRIM_THRESHOLD_": chosen})
    environ.pop("GLIBC_TUNABLES", None)
    command = [sys.executable, "-c", PROGRAM.replace("NBYTES", str(nbytes))]
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, check=True, timeout=HANG_SECONDS
    )
    pages = (16 * 2 << 20) // os.sysconf("SC_PAGESIZE")
    assert (int(done.stdout) < pages // 10) == (chosen is None), (done.stdout, pages)
