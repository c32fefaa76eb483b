"""A transformer writes text with its weights, and its memory of the text, cut among the ranks.

    hvdlite-run -np 2 python examples/torch_generate_sharded.py --steps 300   # train and save
    hvdlite-run -np 4 python examples/torch_generate_sharded.py               # write

It is trained data-parallel, and its checkpoint is whole. To write, it is made without memory for
its weights, its operators are cut by strategies, and each rank reads its parts of the checkpoint.
Attention is cut by heads, and so are the keys and values that each block keeps of what came before.
Needs the extras torch and examples.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch_gpt import ALPHABET, CODES, batch, load_text

import hvdlite.torch as hvd
from hvdlite.torch import sharding

PROMPTS = ["def ", "for ", "    ", "try:", "impo", "self", "retu", "clas"]


class Block(nn.Module):
    """Attention to what came before, then a dense layer for each position."""

    keys: Tensor
    values: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def remember(self, batch_size: int, length: int) -> None:
        """Make room for the keys and values of texts."""
        shape = (batch_size, self.heads, length, self.query.out_features // self.heads)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(shape), persistent=False)

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        normal = self.norm1(x)
        query, key, value = (
            each(normal).view(shape).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        if places is None:
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            there = places[:, None, :, None].expand(key.shape)
            self.keys.scatter_(2, there, key)
            self.values.scatter_(2, there, value)
            before = torch.arange(self.keys.shape[2], device=x.device) <= places[:, None, :, None]
            seen = functional.scaled_dot_product_attention(query, self.keys, self.values, before)
        x = x + self.project(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Codes (B, T) to the scores of the next code; with the places of the codes, step by step."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, len(ALPHABET), bias=False)

    def forward(self, codes: Tensor, places: Tensor | None = None) -> Tensor:
        at = torch.arange(codes.shape[1], device=codes.device) if places is None else places
        x = self.characters(codes) + self.positions(at)
        for block in self.blocks:
            x = block(x, places)
        scores: Tensor = self.scores(self.norm(x))
        return scores


def train(args: argparse.Namespace) -> None:
    """Train data-parallel, and save the model."""
    torch.manual_seed(args.seed)
    text = load_text()
    model = GPT(args.layers, args.width, args.heads, args.context)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3), named_parameters=model.named_parameters()
    )
    loss = torch.zeros(())
    for step in range(args.steps):
        codes, following = batch(text, args, args.seed + step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
    hvd.checkpoint.save(args.checkpoint, {"model": model})
    mean = hvd.allreduce(loss.detach(), name="loss").item()
    if hvd.rank() == 0:
        print(f"step {args.steps}: loss {mean:.4f}", flush=True)


def strategies(layers: int) -> dict[str, Any]:
    """Columns, then rows; attention and what it remembers follow by heads."""
    n = hvd.size()
    columns, rows = ((1, 1, 1), (1, n)), ((1, 1, n), (n, 1))
    found = {}
    for at in range(layers):
        of_block = dict.fromkeys(["query", "key", "value", "up"], columns)
        of_block |= dict.fromkeys(["project", "down"], rows)
        found |= {f"blocks.{at}.{name}": strategy for name, strategy in of_block.items()}
    return found


@torch.no_grad()
def write(args: argparse.Namespace) -> None:
    """Go on with the prompts, of which each rank has its share."""
    prompts = PROMPTS[: len(PROMPTS) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
    codes = torch.tensor([[CODES[each] for each in prompt] for prompt in prompts])
    places = torch.arange(codes.shape[1]).expand(codes.shape)
    with torch.device("meta"):
        model = GPT(args.layers, args.width, args.heads, args.context)
        for block in model.blocks:
            block.remember(len(prompts) * hvd.size(), args.context)
    model = sharding.shard(model, example=(codes, places), strategies=strategies(args.layers))
    hvd.checkpoint.load(args.checkpoint, {"model": model})
    for block in model.blocks:
        block.keys.zero_()
        block.values.zero_()
    scores = model(codes, places)
    while codes.shape[1] < args.context:
        codes = torch.cat([codes, scores[:, -1:].argmax(-1)], 1)
        scores = model(codes[:, -1:], torch.full((len(codes), 1), codes.shape[1] - 1))
    held = sum(each.to_local().numel() for each in model.parameters())
    remembered = model.blocks[0].keys.to_local().shape[1]
    texts = hvd.allgather_object(["".join(ALPHABET[code] for code in text) for text in codes])
    if hvd.rank() == 0:
        whole = sum(each.numel() for each in model.parameters())
        for text in (text for of_rank in zip(*texts, strict=True) for text in of_rank):
            print(repr(text))
        print(
            f"ranks {hvd.size()}: {held} of {whole} weights and the keys of {remembered} of "
            f"{args.heads} heads on rank 0"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write text with a model in parts.")
    parser.add_argument("--steps", type=int, default=0, help="steps to train before")
    parser.add_argument("--batch-size", type=int, default=16, help="excerpts a step, on each rank")
    parser.add_argument("--context", type=int, default=64, help="characters of a text")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("torch_generate_sharded"))
    args = parser.parse_args()

    hvd.init_process_group()
    if args.steps:
        train(args)
    else:
        write(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
