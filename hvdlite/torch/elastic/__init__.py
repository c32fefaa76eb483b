"""Elastic training with PyTorch: go on when ranks are lost, and let new ones join.

@hvd.elastic.run
def train(state):
    while state.epoch < epochs:
        for batch in loader:
            ...
            state.sampler.record_batch(...)
            state.commit()
        state.sampler.set_epoch(state.epoch + 1)
        state.epoch += 1

train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))
"""

from __future__ import annotations

from hvdlite.common.elastic.run import run
from hvdlite.torch.elastic.sampler import ElasticSampler
from hvdlite.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]
