"""Messages of tensors of PyTorch, and their reduction to one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvdlite.common.api.process_group_calls import recv, recv_async, reduce, send, send_async
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.torch.adapter import TorchAdapter
from tests.ranks import run_ranks

ADAPTER = TorchAdapter()
HOSTS = [None, [[0], [1, 2]]]


@pytest.mark.parametrize("hosts", HOSTS)
def test_tensors_of_every_kind_arrive(hosts: Any) -> None:
    def main(rank: int) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.complex64):
            data = (torch.arange(12).reshape(3, 4) % 3).to(dtype)
            for number, tensor in enumerate((data, data.T, data[::2, 1:3], data[0, 0])):
                name = f"{dtype} {number}"
                target = torch.zeros(5, *tensor.shape, dtype=dtype)
                if rank == 0:
                    send(
                        tensor.requires_grad_(tensor.is_floating_point()), 2, name, adapter=ADAPTER
                    )
                elif rank == 2:
                    assert recv(target[3], 0, name, adapter=ADAPTER).equal(tensor)
                    assert not target[[0, 1, 2, 4]].any()

    run_ranks(3, main, hosts=hosts)


def test_messages_that_cross() -> None:
    def main(rank: int) -> None:
        peer = 1 - rank
        sent = [torch.full((100, 300), float(rank + k)) for k in range(5)]
        got = [torch.zeros(300, 100) for _ in range(5)]
        pending = [send_async(x, peer, f"{rank}.{k}", adapter=ADAPTER) for k, x in enumerate(sent)]
        pending += [recv_async(x, peer, f"{peer}.{k}", adapter=ADAPTER) for k, x in enumerate(got)]
        for operation in pending:
            operation.wait()
        for k, tensor in enumerate(got):
            assert (tensor == peer + k).all()

    run_ranks(2, main)


@pytest.mark.parametrize("hosts", HOSTS)
def test_reduce_to_one_rank(hosts: Any) -> None:
    def main(rank: int) -> None:
        for root in range(3):
            tensor = torch.full((7, 3), float(rank + 1)).T
            result = reduce(tensor, root, f"{root}", ReduceOp.SUM, in_place=True, adapter=ADAPTER)
            assert result is tensor
            assert (tensor == (6 if rank == root else rank + 1)).all()
            bits = reduce(torch.tensor([1 << rank, 7]), root, op=ReduceOp.BXOR, adapter=ADAPTER)
            assert bits is None if rank != root else bits.tolist() == [7, 7]

    run_ranks(3, main, hosts=hosts)
