"""How long tests wait for what has to come, before they say that it hangs.

Such a limit measures nothing, and costs time only where a test fails. It has to hold on a machine
that is several times slower than the one that a test was written on, while other tests use its
cores.
"""

from __future__ import annotations

PATIENCE = 4
HANG_SECONDS = 240.0  # Of what takes a few seconds at most.


def patient(seconds: float) -> float:
    """Return the limit of what should take less than `seconds` beside other tests."""
    return PATIENCE * seconds
