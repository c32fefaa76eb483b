"""A worker of the tests: it reduces while it has peers, and raises an error of a world alone."""

from __future__ import annotations

import numpy as np

import hvdlite.numpy as hvd
from tests.elastic.worker_allreduce import say


@hvd.elastic.run
def train(state: hvd.elastic.NumpyState) -> None:
    while hvd.size() > 1:
        hvd.allreduce(np.ones(1), name="x")
        say(size=hvd.size())
    raise hvd.HorovodInternalError("by the script")


if __name__ == "__main__":
    hvd.init()
    train(hvd.elastic.NumpyState())
