"""The transformer of torch_gpt.py, its weights and optimizer state cut among the ranks (FSDP2).

    hvdlite-run -np 4 python examples/torch_fsdp_gpt.py                        # train
    hvdlite-run -np 2 python examples/torch_fsdp_gpt.py --resume --steps 400   # go on with fewer
    python examples/torch_fsdp_gpt.py --resume --steps 0                       # write a sample

Each rank holds one part of every weight. A layer is put together just before it computes, and its
gradients are summed and cut again afterwards. The checkpoint is a folder with one file for each
rank that wrote it; any number of ranks can read it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch_gpt import GPT, batch, learning_rate, load_text, loss_of

import hvdlite.torch as hvd

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # Its place before torch 2.6.
    from torch.distributed._composable.fsdp import fully_shard


def make_model(args: argparse.Namespace) -> GPT:
    """The same model on all ranks, cut among them."""
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.context)
    mesh = init_device_mesh("cpu", (hvd.size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint holds; each rank has its part."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load this rank's part of a checkpoint of any number of ranks; the steps that are done."""
    state = state_of(model, optimizer, 0)
    checkpoint.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(state["step"])


def train(
    model: GPT, optimizer: torch.optim.Optimizer, args: argparse.Namespace, first: int
) -> None:
    """Train from step `first` on. The batch of a step is the same for any number of ranks."""
    text = load_text()
    args.batch_size = args.global_batch // hvd.size()
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        optimizer.zero_grad()
        loss = loss_of(model, *batch(text, args, args.seed + step))
        loss.backward()
        optimizer.step()
        if (step + 1) % args.print_every == 0 or step + 1 == args.steps:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step + 1}: loss {mean:.4f}, ranks {hvd.size()}", flush=True)


def write_sample(model: GPT, length: int) -> None:
    """Write on all ranks, since each has only its part of the weights; rank 0 prints."""
    torch.manual_seed(0)  # The same characters everywhere.
    text = model.write("\ndef ", length)
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to write Python, with weights in parts.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--global-batch", type=int, default=32, help="excerpts of all ranks")
    parser.add_argument("--context", type=int, default=64, help="characters of an excerpt")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-every", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, default=Path("torch_fsdp_gpt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--sample", type=int, default=200, help="characters to write in the end")
    args = parser.parse_args()
    if args.print_every < 1:
        parser.error("--print-every must be at least 1")

    hvd.init_process_group()
    model = make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    first = resume(args.checkpoint, model, optimizer) if args.resume else 0
    if first < args.steps:
        train(model, optimizer, args, first)
        checkpoint.save(state_of(model, optimizer, args.steps), checkpoint_id=args.checkpoint)
    if args.sample:
        write_sample(model, args.sample)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
