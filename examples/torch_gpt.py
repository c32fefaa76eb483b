"""A small transformer that learns to write Python, one character at a time, on any number of ranks.

    python examples/torch_gpt.py                       # one rank
    hvdlite-run -np 2 python examples/torch_gpt.py     # two

It learns from the source text of Python's own standard library. The lines marked "hvdlite:" are
all that makes the script distributed. Rank 0 shows a progress bar, writes a checkpoint (go on from
it with --resume) and prints a sample in the end.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional

import hvdlite.torch as hvd

ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
CODES = {character: code for code, character in enumerate(ALPHABET)}
TEXT_CHARACTERS = 4_000_000
VALIDATION_SHARE = 0.05
WARMUP_STEPS = 20
GRADIENT_NORM = 1.0


def load_text() -> Tensor:
    """Modules of the standard library, one after the other, as codes of `ALPHABET` (int64)."""
    library = Path(os.__file__).parent
    text: list[str] = []
    size = 0
    for path in [*sorted(library.glob("*.py")), *sorted(library.glob("[a-z]*/*.py"))]:
        if size >= TEXT_CHARACTERS:
            break
        if "site-packages" not in path.parts and "test" not in path.parts:
            text.append(path.read_text(encoding="utf-8", errors="ignore").expandtabs(4))
            size += len(text[-1])
    return torch.tensor([CODES[each] for each in "".join(text) if each in CODES])


class Block(nn.Module):
    """Attention to what came before, then a dense layer for each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.dense(self.norm2(x))


class GPT(nn.Module):
    """Codes (B, T) to the scores of the next code (B, T, characters)."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, len(ALPHABET), bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.25)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.characters(codes) + self.positions.weight[: codes.shape[1]]
        return self.scores(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, prompt: str, length: int, temperature: float = 0.7) -> str:
        """`prompt` and `length` characters that may follow it."""
        self.eval()
        codes = torch.tensor([[CODES[each] for each in prompt]])
        for _ in range(length):
            scores = self(codes[:, -self.context :])[:, -1] / temperature
            codes = torch.cat([codes, torch.multinomial(scores.softmax(-1), 1)], dim=1)
        return "".join(ALPHABET[code] for code in codes[0])


def batch(text: Tensor, args: argparse.Namespace, seed: int) -> tuple[Tensor, Tensor]:
    """Random excerpts of `text` and the same moved on by one; the same `seed` gives the same."""
    generator = torch.Generator().manual_seed(seed)
    # hvdlite: each rank takes its own part of the batch of all.
    starts = torch.randint(
        len(text) - args.context, (hvd.size() * args.batch_size,), generator=generator
    )[hvd.rank() :: hvd.size()]
    excerpts = text[starts[:, None] + torch.arange(args.context + 1)]
    return excerpts[:, :-1], excerpts[:, 1:]


def loss_of(model: GPT, codes: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Up in a line, down in half a wave."""
    if step < WARMUP_STEPS:
        return float(args.lr * (step + 1) / WARMUP_STEPS)
    done = (step - WARMUP_STEPS) / max(1, args.steps - WARMUP_STEPS)
    return float(args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))))


def validate(model: GPT, text: Tensor, args: argparse.Namespace) -> float:
    """The mean loss on text that was not learned from."""
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, *batch(text, args, seed)) for seed in range(4)]
    model.train()
    # hvdlite: a metric is averaged over the ranks.
    return float(hvd.allreduce(torch.stack(losses).mean(), name="validation_loss"))


def save(path: Path, model: GPT, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint; an interrupted write leaves the old one."""
    part = path.with_name(path.name + ".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, part)
    part.replace(path)


def resume(path: Path, model: GPT, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint; returns the steps that are done."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def train(args: argparse.Namespace, console: Console) -> GPT:
    text = load_text()
    border = int(len(text) * (1 - VALIDATION_SHARE))
    learned, kept = text[:border], text[border:]
    model = GPT(args.layers, args.width, args.heads, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    # hvdlite: average the gradients of all ranks before each step.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    first = 0
    if args.resume and hvd.rank() == 0:  # hvdlite: one rank reads the checkpoint,
        first = resume(args.checkpoint, model, optimizer)
    # hvdlite: and all go on from there with the same state.
    first = hvd.broadcast_object(first, root_rank=0, name="first_step")
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console, disable=hvd.rank() != 0) as progress:
        bar = progress.add_task("", total=args.steps, completed=first, now="")
        for step in range(first, args.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            optimizer.zero_grad()
            loss = loss_of(model, *batch(learned, args, args.seed + step))
            loss.backward()
            # hvdlite: to clip, wait for the averaged gradients before the step.
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
            with optimizer.skip_synchronize():
                optimizer.step()
            progress.update(bar, advance=1, now=f"loss {loss.item():.3f}")
            if (step + 1) % args.check_every == 0 or step + 1 == args.steps:
                reached = validate(model, kept, args)
                if hvd.rank() == 0:  # hvdlite: one rank writes for all.
                    progress.console.print(f"step {step + 1}: validation loss {reached:.3f}")
                    save(args.checkpoint, model, optimizer, step + 1)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to write Python.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=16, help="excerpts a step, on each rank")
    parser.add_argument("--context", type=int, default=64, help="characters of an excerpt")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("torch_gpt.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--sample", type=int, default=400, help="characters to write in the end")
    args = parser.parse_args()

    hvd.init()  # hvdlite: who am I, and who else is there?
    torch.manual_seed(args.seed)
    console = Console(soft_wrap=True)
    model = train(args, console)
    if hvd.rank() == 0:
        console.rule("a sample")
        print(model.write("\ndef ", args.sample), flush=True)


if __name__ == "__main__":
    main()
