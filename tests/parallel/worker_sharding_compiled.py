"""One of 2 ranks: a sharded part under torch.compile gives what it gives without.

python -m tests.parallel.worker_sharding_compiled
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hvdlite.torch as hvd
from hvdlite.torch import sharding

WORDS, WIDTH, CLASSES = 6, 16, 32


class Net(nn.Module):
    """Whatever exchanges something, or draws random numbers, inside of an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Any, target: Any) -> Any:
        x = self.words(words)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.drop(self.norm(x.mT).mT)
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten()), x


def part(example: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    n = hvd.size()
    cuts: Any = {
        "words": ((n, 1), (1, 1)), "head": ((1, 1, 1), (1, n)), "norm": ((n, 1, 1), *((1,),) * 4),
        "attention.scaled_dot_product_attention": ((1, n, 1, 1),) * 3,
        "cross_entropy_loss": ((1, n), (1,)),
    }  # fmt: skip
    return sharding.shard(Net(), example=example, strategies=cuts)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init_process_group()
    generator = torch.Generator().manual_seed(hvd.rank())
    words = torch.randint(CLASSES, (4, WORDS), generator=generator)
    example = (words, words.roll(1, 1))
    plain, other = part(example), part(example)
    graphs: list[int] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(other, backend=compiler)
    for share in (example, tuple(each[:2] for each in example), example):
        results = []
        for each in (plain, compiled):
            torch.manual_seed(7)  # Of the numbers that rank 0 draws for the dropout.
            loss, x = each(*share)
            loss.backward()
            results.append((loss, x))
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two)
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local(), two.grad.to_local())
    torch.testing.assert_close(
        plain.norm.running_var.full_tensor(), other.norm.running_var.full_tensor()
    )
    assert sum(graphs) >= 10, f"operators are compiled between exchanges, not {graphs}"
    dist.destroy_process_group()
    sys.stdout.write("is content\n")


if __name__ == "__main__":
    main()
