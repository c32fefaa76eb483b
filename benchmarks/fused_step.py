"""How long an optimizer's step takes: torch's own three ways, and hvdlite's over flat segments.

    python benchmarks/fused_step.py                 # ResNet-50 and a transformer: some minutes
    python benchmarks/fused_step.py --quick         # the transformer alone, half a minute

Needs the extras torch and examples. One process with one computing thread, as a rank has. All ways
are timed in turns, each with a copy of the network. A second table compares two ways to begin the
next step: with gradients that stay in the buffers and are made zero, or with none, so that backward
makes new ones that have to be copied.

Prints tables (median and quartiles), and writes all figures to a JSON file.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measuring import Spread, Way, interleave, make_parser, parse, say, table, write
from torch import Tensor, nn

import hvdlite.torch as hvd
from hvdlite.torch.flat_gradients import FlatGradients
from hvdlite.torch.fused_step import FusedStep

EXAMPLES = Path(__file__).parent.parent / "examples"
SEGMENT_BYTES = 32 << 20
FLAGS: dict[str, dict[str, bool]] = {
    "default": {},
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD, momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
}
ENTRIES = [
    *(("torch", flags) for flags in ("default", "foreach", "fused")),
    *(("hvdlite", flags) for flags in FLAGS),
]
Record = dict[str, Any]


def resnet50() -> tuple[nn.Module, Tensor]:
    """Return the network of torch_synthetic_benchmark.py, and small images."""
    from torch_synthetic_benchmark import ResNet50

    return ResNet50(), torch.randn(2, 3, 64, 64)


def gpt() -> tuple[nn.Module, Tensor]:
    """Return the transformer of torch_gpt.py, and a text for it."""
    from torch_gpt import ALPHABET, GPT

    model = GPT(layers=4, width=128, heads=4, context=64)
    return model, torch.randint(len(ALPHABET), (4, 64))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"resnet50": resnet50, "gpt": gpt}


def segments_of(model: nn.Module) -> list[FlatGradients]:
    """In the order of backward, each closed when it has `SEGMENT_BYTES`."""
    segment_schedule: list[list[Tensor]] = [[]]
    size = 0
    for parameter in reversed([*model.parameters()]):
        if size >= SEGMENT_BYTES:
            segment_schedule.append([])
            size = 0
        segment_schedule[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return [FlatGradients(cut) for cut in segment_schedule]


def make_step(model: nn.Module, library: str, flags: str, optimizer: str) -> Way:
    """Return a step of an optimizer on a copy of the network that has gradients."""
    model = copy.deepcopy(model)
    make, options = OPTIMIZERS[optimizer]
    made = make(model.parameters(), **options, **FLAGS[flags])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    if library == "torch":
        return made.step
    segments = segments_of(model)
    for flat in segments:
        for parameter in flat.parameters:
            flat.adopt(parameter)
    fused, reason = FusedStep.of(made, segments)
    if fused is None:
        raise RuntimeError(reason)
    return fused.step


def taker(flat: FlatGradients) -> Callable[[Tensor], None]:
    """Return a hook that puts a gradient into its buffer."""

    def take(parameter: Tensor) -> None:
        flat.adopt(parameter)

    return take


def make_backward(model: nn.Module, inputs: Tensor, way: str) -> Way:
    """From ``zero_grad`` to gradients of the next step."""
    model = copy.deepcopy(model)
    segments = segments_of(model) if way != "separate" else []
    for flat in segments:
        for parameter in flat.parameters:
            register: Any = parameter.register_post_accumulate_grad_hook  # has no types
            register(taker(flat))

    def step() -> None:
        if way == "zero":
            for flat in segments:
                flat.buffer.zero_()
        else:
            model.zero_grad()
        model(inputs).square().mean().backward()

    return step


def measure(kind: str, network: str, ways: dict[str, Way], seconds: float) -> list[Record]:
    """Return the figures of all ways."""
    for way in ways.values():
        for _ in range(3):
            way()
    records = []
    for name, taken in interleave(ways, seconds).items():
        times = asdict(Spread.quartiles(taken))
        records.append({"kind": kind, "network": network, "way": name, "seconds": times})
    return records


def print_tables(records: list[Record]) -> None:
    """Print a table for each kind of measurement, with a line for each way."""
    networks = [*dict.fromkeys(record["network"] for record in records)]
    for kind in dict.fromkeys(record["kind"] for record in records):
        lines: dict[str, dict[str, str]] = {}
        for record in records:
            if record["kind"] == kind:
                line = lines.setdefault(record["way"], {})
                line[record["network"]] = str(Spread(**record["seconds"]))
        rows = [[way, *(line[network] for network in networks)] for way, line in lines.items()]
        print()
        print(table([kind, *networks], rows))


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("How long an optimizer's step takes.", "fused_step")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--seconds", type=float, default=30, help="for a part of a table")
    return parse(parser, "the transformer alone, 3 seconds", networks=["gpt"], seconds=3)


def main() -> None:
    args = parse_arguments()
    sys.path.append(str(EXAMPLES))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    hvd.init()
    records: list[Record] = []
    for network in args.networks:
        model, inputs = NETWORKS[network]()
        for optimizer in OPTIMIZERS:
            say(f"{network}, {optimizer}")
            ways = {
                f"{library} {flags}": make_step(model, library, flags, optimizer)
                for library, flags in ENTRIES
            }
            records += measure(f"step of {optimizer}", network, ways, args.seconds)
        say(f"{network}, backward")
        backward = {way: make_backward(model, inputs, way) for way in ("separate", "none", "zero")}
        records += measure("zero_grad and backward", network, backward, args.seconds)
    print_tables(records)
    write(args.json, records)


if __name__ == "__main__":
    main()
