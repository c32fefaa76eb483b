"""Compressors for slow links: a step of ResNet-50's gradients, and what training reaches.

    python benchmarks/compression.py                  # two simulated hosts of 1 Gbit/s
    python benchmarks/compression.py --only training  # digits and a GPT, two ranks on this machine

A step computes 97 MiB of gradients almost without work, so that next to nothing hides what is sent,
and ends with a step of SGD. "alone" exchanges nothing; DDP and its PowerSGD hook run over gloo.
Each way runs in jobs of its own, in turns. See `simulated_hosts` for what the hosts need.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from jobs import in_turns, run_job, summarize
from measuring import (
    HVDLITE_RANKS,
    Ranks,
    Spread,
    duration,
    interleave,
    make_parser,
    say,
    table,
    write,
)
from peers import GlooRanks
from simulated_hosts import ROOT, TCP, add_link_options, describe, two_hosts

ALONE, NONE, DDP, HOOK = "alone", "none", "DDP", "DDP, PowerSGD hook"
COMPRESSORS = (NONE, "fp16", "bf16", "int8", "powersgd(4)", "topk(0.01)", "onebit")
ENTRIES = (ALONE, *COMPRESSORS, DDP, HOOK)
WARM_UP = 5  # steps: the hook of PyTorch begins with the third
STEP, TRAINING = "step", "training"
Distribute = Callable[[Any, Any], tuple[Any, Any]]  # See `distribute`.


def compressor(entry: str, choices: Any, warmup_steps: int = 0) -> Any:
    """Return a compressor that is written as in the table, such as "powersgd(4)"."""
    name, _, number = entry.rstrip(")").partition("(")
    found = getattr(choices, name)
    if isinstance(found, type):
        return found
    made = found(*([float(number) if "." in number else int(number)] if number else []))
    return made if name == "int8" else dataclasses.replace(made, warmup_steps=warmup_steps)


def make_model(tensors: int) -> Any:
    """Return a module with ResNet-50's first parameters, and fixed random numbers as gradients."""
    import torch

    sys.path.append(str(ROOT))
    from tests.resnet50 import PARAMETERS

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = [shape for _, shape in PARAMETERS[:tensors]]
            self.weights = torch.nn.ParameterList(map(torch.zeros, shapes))
            self.given = [*map(torch.randn, shapes)]

        def forward(self) -> Any:
            pairs = zip(self.weights, self.given, strict=True)
            return sum(torch.dot(weight.view(-1), given.view(-1)) for weight, given in pairs)

    return Model()


def connect(entry: str, args: argparse.Namespace) -> tuple[Ranks, Callable[[], None]]:
    """Connect the ranks of a job, and return its step."""
    import torch

    torch.set_num_threads(1)
    ranks: Ranks = HVDLITE_RANKS
    if entry in (DDP, HOOK):
        os.environ["GLOO_SOCKET_IFNAME"] = next(n for _, n in socket.if_nameindex() if n != "lo")
        ranks = GlooRanks(args.rank_file.with_suffix(".meeting"), 2 * args.ranks_per_host)
    else:
        import hvdlite.torch as hvd

        hvd.init()
    torch.manual_seed(ranks.rank)
    model = make_model(args.tensors)
    module, optimizer = distribute(entry, model, torch.optim.SGD(model.parameters(), lr=1e-3))

    def step() -> None:
        optimizer.zero_grad()
        module().backward()
        optimizer.step()

    return ranks, step


def distribute(entry: str, model: Any, optimizer: Any, warmup_steps: int = 0) -> tuple[Any, Any]:
    """Return what computes the loss of a model, and what updates it, as a way has them."""
    if entry == ALONE:
        return model, optimizer
    if entry not in (DDP, HOOK):
        import hvdlite.torch as hvd

        chosen = compressor(entry, hvd.Compression, warmup_steps)
        return model, hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=chosen
        )
    import torch

    # The hook starts collectives in callbacks, whose order over several buckets differs between
    # ranks: gloo then receives what it does not expect, and ends the job.
    bucket = {"bucket_cap_mb": 1000} if entry == HOOK else {}
    module = torch.nn.parallel.DistributedDataParallel(model, **bucket)
    if entry == HOOK:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

        state = hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=max(2, warmup_steps)
        )
        module.register_comm_hook(state, hook.powerSGD_hook)
    return module, optimizer


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank of a job; rank 0 writes what it has measured."""
    (entry,) = args.entries
    if args.only == TRAINING:
        records = train(entry, args)
    else:
        ranks, step = connect(entry, args)
        for _ in range(WARM_UP):
            step()
        (seconds,) = interleave({entry: step}, args.seconds, ranks).values()
        median = Spread.quartiles(seconds).median
        records = [{"entry": entry, "what": STEP, "seconds": median}] if ranks.rank == 0 else []
    if records:
        args.rank_file.write_text(json.dumps(records))


def train(entry: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train with a compressor; return the loss on rank 0."""
    import torch

    import hvdlite.torch as hvd

    sys.path.append(str(ROOT / "examples"))
    hvd.init()
    torch.set_num_threads(1)
    if entry in (DDP, HOOK):
        GlooRanks(args.rank_file.with_suffix(".meeting"), hvd.size())
    (what,) = args.trainings
    loss = TRAININGS[what](partial(distribute, entry, warmup_steps=args.warmup_steps), args)
    say(f"{what}, {entry}: {loss:.4f}")
    return [{"entry": entry, "what": what, "loss": loss}] if hvd.rank() == 0 else []


def train_digits(distributed: Distribute, args: argparse.Namespace) -> float:
    """Train as `examples/torch_digits.py` does; return the mean loss of the last epoch."""
    import torch
    import torch_digits as digits

    import hvdlite.torch as hvd

    torch.manual_seed(42)
    model = digits.Net()
    torch.manual_seed(42 + hvd.rank())
    data, _ = digits.load()
    batches = digits.share(data, 64 // hvd.size(), shuffle=True)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=2e-3)
    module, optimizer = distributed(model, optimizer)
    losses: list[float] = []
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(args.epochs):
        batches.sampler.set_epoch(epoch)
        losses = []
        for images, labels in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        schedule.step()
    mean = hvd.allreduce(torch.tensor(sum(losses) / len(losses)), name="loss")
    return float(mean)


def train_gpt(distributed: Distribute, args: argparse.Namespace) -> float:
    """Train as `examples/torch_gpt.py` does; return the loss of its validation."""
    import torch
    import torch_gpt as gpt

    options = argparse.Namespace(
        steps=args.steps, batch_size=16, context=64, lr=5e-3, seed=0, layers=4, width=128, heads=4
    )
    torch.manual_seed(0)
    text = gpt.load_text()
    border = int(len(text) * (1 - gpt.VALIDATION_SHARE))
    model = gpt.GPT(4, 128, 4, 64)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    module, optimizer = distributed(model, optimizer)
    synchronized: Any = contextlib.nullcontext
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = gpt.learning_rate(step, options)
        optimizer.zero_grad()
        gpt.loss_of(module, *gpt.batch(text[:border], options, step)).backward()
        if module is model:
            optimizer.synchronize()
            synchronized = optimizer.skip_synchronize
        torch.nn.utils.clip_grad_norm_(model.parameters(), gpt.GRADIENT_NORM)
        with synchronized():
            optimizer.step()
    return float(gpt.validate(model, text[border:], options))


TRAININGS = {"digits": train_digits, "GPT": train_gpt}


def print_steps(records: list[dict[str, Any]]) -> None:
    """Print a row for each way."""
    spreads = {record["entry"]: Spread(**record["seconds"]) for record in records}
    none = spreads.get(NONE)
    rows = [
        [name, str(each), f"{none.median / each.median:.2f} times" if none else ""]
        for name, each in spreads.items()
    ]
    print(table(["way", "step", "faster than none"], rows))
    if HOOK in spreads and "powersgd(4)" in spreads:
        ratio = spreads["powersgd(4)"].median / spreads[HOOK].median
        print(f"\npowersgd(4) takes {ratio:.2f} of the step of PyTorch's hook, which takes "
              f"{duration(spreads[HOOK].median)}")  # fmt: skip


def print_losses(records: list[dict[str, Any]]) -> None:
    """Print a row for each training."""
    none = {each["what"]: each["loss"] for each in records if each["entry"] == NONE}
    rows = [
        [each["what"], each["entry"], f"{each['loss']:.4f}",
         f"{each['loss'] / none[each['what']] - 1:+.2%}" if each["what"] in none else ""]
        for each in records
    ]  # fmt: skip
    print(table(["training", "compression", "loss", "beside none"], rows))


def main() -> None:
    parser = make_parser("Compressors for slow links.", "compression")
    add = parser.add_argument
    add("--entries", nargs="+", default=list(ENTRIES), metavar="WAY",
        help=", ".join(ENTRIES) + "; or with another number")  # fmt: skip
    add("--only", choices=(STEP, TRAINING), default=STEP)
    add("--trainings", nargs="+", choices=TRAININGS, default=[*TRAININGS])
    add("--rounds", type=int, default=3, help="jobs of each way, in turns")
    add("--seconds", type=float, default=8, help="of a job")
    add("--tensors", type=int, default=161, help="of ResNet-50, the first ones")
    add("--warmup-steps", type=int, default=100, help="of a training: nothing is compressed")
    add("--epochs", type=int, default=15, help="of the digits")
    add("--steps", type=int, default=600, help="of the GPT")
    add_link_options(parser, gbit=1)
    args = parser.parse_args()
    if args.rank_file:
        rank_main(args)
    elif args.only == TRAINING:
        trained = [entry for entry in args.entries if entry not in (ALONE, DDP)]
        records = [
            record
            for what, entry in product(args.trainings, trained)
            for record in run_job(
                __file__, [*sys.argv[1:], "--trainings", what, "--entries", entry], 2
            )
        ]
        print_losses(records)
        write(args.json, records)
    else:
        with two_hosts(args) as hosts:
            jobs = {
                name: partial(hosts.measure, TCP, __file__, [*sys.argv[1:], "--entries", name])
                for name in args.entries
            }
            records = [each for runs in in_turns(jobs, args.rounds).values()
                       for each in summarize(runs)]  # fmt: skip
        print(f"{describe(args, hosts.delayed_by)}, {args.rounds} jobs each\n")
        print_steps(records)
        write(args.json, records)


if __name__ == "__main__":
    main()
