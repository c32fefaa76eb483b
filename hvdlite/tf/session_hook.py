"""`BroadcastGlobalVariablesHook`: ranks of a monitored session begin with the same variables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.tf.functions import broadcast_global_variables


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all global variables their value on the global rank `root_rank`, once they have one.

    For ``tf.compat.v1.train.MonitoredTrainingSession(hooks=[...])``: variables that the root has
    restored from a checkpoint reach all ranks, and so do those that were initialized at random.
    `device` has no effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Put the operation into the graph, which can still be changed."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it: variables are initialized or restored now."""
        session.run(self.bcast_op)


__all__ = ["BroadcastGlobalVariablesHook"]
