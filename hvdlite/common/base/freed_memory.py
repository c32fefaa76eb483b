"""Memory that each step frees, and takes again.

[Note: freed memory]
``zero_grad()`` frees the gradients. glibc returns large blocks to the kernel, which clears each
page when backward touches it again: some 0.3 ms for each MiB, more than it takes to reduce it
inside of a host. So glibc is told to keep twice as many bytes as gradients take, since other memory
of a step is freed beside them, in blocks of up to 32 MiB, the largest that it can keep. It keeps 64
MiB at least, to which it comes by itself where blocks of 32 MiB are freed: once it is told anything
it does not adapt any more. The most memory that a process has in a step does not change, as
backward ends with all gradients there. Processes that are forked later do as they would without.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

# Of glibc: the parameters of `mallopt`, and the largest block that it can keep.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK = 32 << 20
_LEAST_BYTES = 2 * _LARGEST_BLOCK
_MOST_BYTES = 2**31 - 1  # `mallopt` takes an int.
# A user who sets one of these has decided.
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

_lock = threading.Lock()
_kept = 0


def keep_freed_memory(nbytes: int) -> None:
    """Let this process keep so many bytes that are freed, or more if it was told so before.

    Nothing happens with another C library than glibc, or where the user has set `VARIABLES`.
    """
    global _kept  # noqa: PLW0603
    nbytes = min(max(nbytes, _LEAST_BYTES), _MOST_BYTES)
    with _lock:
        if nbytes <= _kept or any(name in os.environ for name in VARIABLES):
            return
        if platform.libc_ver()[0] != "glibc" or not _tell(_MMAP_THRESHOLD, _LARGEST_BLOCK):
            return
        _tell(_TRIM_THRESHOLD, nbytes)
        if _kept == 0:
            os.register_at_fork(after_in_child=_keep_less)
        _kept = nbytes


def _keep_less() -> None:
    """Keep in a forked process, such as a loader's, what glibc would keep there by itself."""
    global _kept  # noqa: PLW0603
    _tell(_TRIM_THRESHOLD, _LEAST_BYTES)
    _kept = _LEAST_BYTES


def _tell(parameter: int, value: int) -> bool:
    """Set a parameter of glibc's allocator; return whether it can be set."""
    return bool(ctypes.CDLL(None).mallopt(parameter, value))
