"""Checkpoints of numpy arrays that are cut among ranks.

layouts = {"weights": Layout([4], [0, -1])}  # this rank holds a quarter of the rows
hvd.checkpoint.save("model", {"weights": rows, "step": 100}, layouts)
hvd.checkpoint.load("model", {"weights": all_rows, "step": 0})  # with any number of ranks
"""

from hvdlite.checkpoint import public
from hvdlite.checkpoint.public import *  # noqa: F403

__all__ = [*public.__all__]  # noqa: PLE0604 - they are strings
