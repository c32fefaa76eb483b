"""Large results of PyTorch lie in memory that is kept for later ones."""

from __future__ import annotations

import gc

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.tensors.result_memory import LEAST_BYTES, result_memory
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_memory, "limit_bytes", 64 << 20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
def test_results_are_right_and_their_memory_serves_again(dtype: torch.dtype) -> None:
    rows = LEAST_BYTES // torch.empty((), dtype=dtype).element_size()
    starts: list[int] = []

    def main(rank: int) -> None:
        for turn in range(3):
            given = torch.full((rows // 4, 4), (turn + rank) % 2).to(dtype)
            result = hvd.allgather(given, name="large")
            assert result.dtype == dtype
            assert result.shape == (rows // 2, 4)
            for part, owner in zip(result.chunk(2), range(2), strict=True):
                assert (part == torch.tensor((turn + owner) % 2).to(dtype)).all()
            starts.append(result.data_ptr())

    run_ranks(2, main)
    gc.collect()
    assert len(set(starts)) <= 4
    result_memory.release()


def test_gradients_flow_through_such_results() -> None:
    def main(rank: int) -> None:
        given = torch.ones(LEAST_BYTES // 8, requires_grad=True)
        result = hvd.allgather(given, name="large")
        (result * 3).sum().backward()
        assert given.grad is not None
        assert (given.grad == 3).all()
        view = result.detach()[5:].view(-1)
        del result
        gc.collect()
        expected = view.clone()
        other = hvd.allgather(torch.zeros(LEAST_BYTES // 8), name="other")
        assert (other == 0).all()
        assert (view == expected).all()

    run_ranks(2, main)
    result_memory.release()
