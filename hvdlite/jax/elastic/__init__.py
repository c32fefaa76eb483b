"""Elastic training with JAX: go on when ranks are lost, and let new ones join.

@hvd.elastic.run
def train(state):
    while state.step < steps:
        state.params, state.opt_state = train_step(state.params, state.opt_state, batch(state.step))
        state.step += 1
        state.commit()

train(hvd.elastic.JaxState(params=params, opt_state=opt_state, step=0))
"""

from __future__ import annotations

from hvdlite.jax.elastic.state import JaxState, run

__all__ = ["JaxState", "run"]
