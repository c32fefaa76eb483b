"""A step with a divided state sends the bytes of an allreduce: each rank 2 (n - 1) / n of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.runtime.current import current
from hvdlite.common.transport.inprocess import InProcessTransport
from tests.ranks import run_ranks

SIZE = 4
WIDTH = 128


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes that each rank has given to its transport."""
    counts: Counter[int] = Counter()
    isend = InProcessTransport.isend

    def counting(self: InProcessTransport, rank: int, array: Any) -> Any:
        counts[self.rank] += array.nbytes
        return isend(self, rank, array)

    monkeypatch.setattr(InProcessTransport, "isend", counting)
    return counts


@pytest.mark.parametrize("shard_state", [False, True])
def test_bytes_of_a_step(sent: Counter[int], shard_state: bool) -> None:
    values = WIDTH * WIDTH * 4 + WIDTH * 4

    def main(rank: int) -> tuple[int, int]:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), model.named_parameters(), shard_state=shard_state
        )
        for _ in range(2):  # The first one arranges shards, and copies values.
            hvd.barrier()
            before = sent[current().rank]
            optimizer.zero_grad()
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            hvd.barrier()
        return before, sent[current().rank]

    # Each rank is a host: inside of one they share memory, and send nothing.
    counts = run_ranks(SIZE, main, hosts=[[rank] for rank in range(SIZE)])
    for before, after in counts:
        assert after - before == pytest.approx(2 * (SIZE - 1) / SIZE * values, rel=0.02)
