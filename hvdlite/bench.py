"""Check an installation, and measure it: ``python -m hvdlite.bench``.

    hvdlite-run -np 4 python -m hvdlite.bench                 # everything, in some seconds
    hvdlite-run -np 4 python -m hvdlite.bench helloworld      # where each rank runs
    hvdlite-run -np 4 python -m hvdlite.bench ring            # data goes once around all ranks
    hvdlite-run -np 4 python -m hvdlite.bench latency         # how long small tensors take
    hvdlite-run -np 4 python -m hvdlite.bench bandwidth       # how fast large tensors are
    hvdlite-run -np 8 -H a:4,b:4 python -m hvdlite.bench model   # the network between the hosts

The last one writes the file by which later jobs choose how to reduce between hosts.

Every result is compared with what numpy computes from the inputs of all ranks, before it is timed.
Rank 0 prints. A wrong result ends all ranks with exit code 1, and a single rank, which has no
other to talk with, ends with exit code 2 and says how to start several.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import hvdlite
import hvdlite.numpy as hvd
from hvdlite.common.api.network_model import compared_algorithms, measured_model
from hvdlite.common.api.objects import allgather_object
from hvdlite.common.collectives.between_hosts.costs import ALLREDUCE, COSTS, Model
from hvdlite.common.collectives.between_hosts.model_file import save, usual_path
from hvdlite.common.runtime.current import current
from hvdlite.common.tensors.numpy_adapter import Array

ALONE = 2  # The exit code where there is nobody to talk with.
WARM_CALLS = 5
LATENCY_SIZES = (4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
MODEL_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
USUAL = "~/.config/hvdlite/network_model.json"
BANDWIDTH_SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)


class WrongResultError(Exception):
    """A collective has returned another result than numpy computes."""


def _own_part(array: Any) -> Array:
    """Return the part of this rank of an array that is divided among the ranks."""
    part: Array = np.split(array, hvd.size())[hvd.rank()]
    return part


@dataclass(frozen=True)
class Collective:
    """How a collective runs, its result by numpy, and its share of traffic."""

    run: Callable[[Array, str], Array]  # It takes the input and a name.
    # It takes the inputs of all ranks, which are made one by one: together they may be too large.
    expected: Callable[[Iterator[Array]], Any]
    bus_share: Callable[[int], float]  # It takes the number of ranks; 1 is the bytes of the input.
    divided: bool = False  # The input is divided among the ranks.


COLLECTIVES = {
    "allreduce": Collective(  # in place, as gradients are
        lambda array, name: hvd.allreduce_(array, name=name, op=hvd.Sum),
        sum,
        lambda size: 2 * (size - 1) / size,
    ),
    "reducescatter": Collective(
        lambda array, name: hvd.reducescatter(array, name=name, op=hvd.Sum),
        lambda inputs: _own_part(sum(inputs)),
        lambda size: (size - 1) / size,
        divided=True,
    ),
    "allgather": Collective(
        lambda array, name: hvd.allgather(array, name=name),
        lambda inputs: np.concatenate([*inputs]),
        lambda size: size - 1,
    ),
    "broadcast": Collective(
        lambda array, name: hvd.broadcast(array, 0, name=name),
        next,
        lambda size: 1,
    ),
    "alltoall": Collective(
        lambda array, name: hvd.alltoall(array, name=name),
        lambda inputs: np.concatenate([*map(_own_part, inputs)]),
        lambda size: (size - 1) / size,
        divided=True,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` on every rank; return the exit code.

    It is 0, 1 for a wrong result, or 2 where one rank alone has nothing to measure.
    """
    options = _parser().parse_args(argv)
    hvd.init()
    commands = [options.run] if options.run else [helloworld, ring, latency, bandwidth]
    if not options.run and len(current().topology.hosts) > 1:
        commands.append(model)
    if hvd.size() == 1 and commands != [helloworld]:
        words = shlex.join(sys.argv[1:] if argv is None else argv)
        start = f"hvdlite-run -np 2 python -m hvdlite.bench {words}".rstrip()
        print(f"hvdlite.bench: 1 rank has no other to talk with; start 2: {start}", file=sys.stderr)
        return ALONE
    try:
        for number, command in enumerate(commands):
            _show("\n" * (number > 0) + f"{command.__name__}, {_ranks(hvd.size())}")
            command(options)
    except WrongResultError as error:
        if hvd.rank() == 0:
            print(f"hvdlite.bench: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdlite.bench",
        description="Check an installation, and measure it. Without a command: everything.",
    )
    # These defaults serve the commands that lack an option, and all commands if none is named.
    parser.set_defaults(run=None, collective="allreduce", bytes=None, calls=None, output=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in (helloworld, ring, latency, bandwidth, model):
        summary = (command.__doc__ or "").partition("\n")[0]
        added = commands.add_parser(command.__name__, help=summary, description=summary)
        added.set_defaults(run=command)
        if command is not helloworld:
            sizes: dict[str, Any] = {"type": _positive, "nargs": "+", "metavar": "N"}
            added.add_argument("--bytes", **sizes, help="sizes of the tensor of each rank")
        if command is model:
            added.add_argument("--calls", type=_positive, metavar="N", help="calls to time")
            added.add_argument("--output", type=Path, metavar="FILE", help="default: " + USUAL)
        if command in (latency, bandwidth):
            added.add_argument("--collective", choices=COLLECTIVES, help="default: allreduce")
            added.add_argument("--calls", type=_positive, metavar="N", help="calls to time")
            added.set_defaults(collective="allreduce")
    return parser


def _positive(text: str) -> int:
    """Return a positive number. Raises `argparse.ArgumentTypeError` for anything else."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


# -- the commands


def helloworld(options: argparse.Namespace) -> None:
    """Show where each rank runs."""
    mine = (f"rank {hvd.rank()}", platform.node(), f"{hvd.local_rank()} of {hvd.local_size()}",
            str(os.getpid()), platform.python_version(), hvdlite.__version__)  # fmt: skip
    _table(["", "host", "local rank", "pid", "Python", "hvdlite"], allgather_object(mine))


def ring(options: argparse.Namespace) -> None:
    """Send a tensor from rank to rank until it is back, and check it at every stop."""
    rank, size = hvd.rank(), hvd.size()
    rows = []
    for nbytes in options.bytes or (4, 64 << 10, 1 << 20):
        held = _values(rank, nbytes // 4 or 1)
        splits = np.zeros(size, np.int64)
        splits[(rank + 1) % size] = held.size
        hops = []
        for hop in range(1, size + 1):
            start = time.perf_counter()
            held, _ = hvd.alltoall(held, splits, name=f"bench.ring.{nbytes}")
            hops.append(time.perf_counter() - start)
            _check(f"ring of {nbytes} bytes, hop {hop}", held, _values(rank - hop, splits.max()))
        rows.append([_size_text(held.nbytes), str(size), _time_text(median(_slowest(hops)))])
    _table(["ring", "hops", "one hop"], rows)


def latency(options: argparse.Namespace) -> None:
    """Measure how long a collective of small tensors takes."""
    rows = []
    for nbytes in options.bytes or LATENCY_SIZES:
        measured, seconds = _measure(options.collective, nbytes, options.calls or 200)
        figures = (median(seconds), min(seconds), max(seconds))
        rows.append([_size_text(measured), *map(_time_text, figures)])
    _table([options.collective, "median", "least", "most"], rows)


def bandwidth(options: argparse.Namespace) -> None:
    """Measure how many bytes a second a collective of large tensors reduces or moves."""
    share = COLLECTIVES[options.collective].bus_share(hvd.size())
    rows = []
    for nbytes in options.bytes or BANDWIDTH_SIZES:
        measured, seconds = _measure(options.collective, nbytes, options.calls or 10)
        rate = measured / median(seconds) / 1e9
        rates = (f"{rate:.2f} GB/s", f"{rate * share:.2f} GB/s")
        rows.append([_size_text(measured), _time_text(median(seconds)), *rates])
    _table([options.collective, "median", "tensor / time", "through each link"], rows)


def model(options: argparse.Namespace) -> None:
    """Measure the network between the hosts, and write what the choice of allreduce goes by."""
    hosts = len(current().topology.hosts)
    if hosts == 1:
        _show("all ranks are on one host: there is no network to measure")
        return
    found = measured_model()
    defaults = Model()
    rows = [[name, _figure_text(getattr(found, name)), _figure_text(getattr(defaults, name))]
            for name in Model.names()]  # fmt: skip
    _table(["figure", "measured", "default"], rows)
    _show("")
    sizes = options.bytes or MODEL_SIZES
    predictions = compared_algorithms(found, sizes, options.calls or 5)
    rows = [
        [_size_text(size), *(f"{_time_text(p)} ({_time_text(m)})" for p, m in times), chosen]
        for size, times, chosen in predictions
    ]
    _table([f"{hosts} hosts: model (measured)", *COSTS[ALLREDUCE], "chosen"], rows)
    if hvd.rank() == 0:
        path = options.output or usual_path()
        try:
            save(path, found, {"hosts": hosts, "ranks": hvd.size()})
        except OSError as error:
            text = f"hvdlite.bench: cannot write {path}: {error.strerror}"
            raise SystemExit(f"{text}; --output names another file") from None
        _show(f"\nwritten to {path}: HVDLITE_NETWORK_MODEL names another file")


# -- what they share


def _values(rank: int, count: int) -> Array:
    """Return the input of a rank: whole numbers, of which float32 holds all sums exactly."""
    return ((np.arange(count) + rank % hvd.size()) % 251).astype(np.float32)


def _measure(collective: str, nbytes: int, calls: int) -> tuple[int, list[float]]:
    """Check a collective; return the bytes of each rank's tensor, and the seconds of each call.

    The tensor has `nbytes` bytes of float32, or a few more where it is divided among the ranks.
    The seconds are those of the slowest rank.
    """
    spec, name, size = COLLECTIVES[collective], f"bench.{collective}.{nbytes}", hvd.size()
    count = max(nbytes // 4, 1)
    count += -count % size if spec.divided else 0
    array = _values(hvd.rank(), count)
    expected = spec.expected(_values(rank, count) for rank in range(size))
    _check(f"{collective} of {array.nbytes} bytes", spec.run(array, name), expected)
    array.fill(0)  # so that no sum grows from call to call
    for _ in range(WARM_CALLS):
        spec.run(array, name)
    hvd.barrier()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        spec.run(array, name)
        seconds.append(time.perf_counter() - start)
    return array.nbytes, _slowest(seconds)


def _check(what: str, result: Array, expected: Array) -> None:
    """Raise `WrongResultError` on all ranks if the result of one is not what numpy expects."""
    problem = ""
    if result.shape != expected.shape:
        problem = f"has the shape {result.shape}, and not {expected.shape}"
    elif wrong := np.flatnonzero(result != expected)[:1].tolist():
        problem = f"has {result[wrong[0]]} at index {wrong[0]}, and not {expected[wrong[0]]}"
    problems = {rank: each for rank, each in enumerate(allgather_object(problem)) if each}
    for rank, each in problems.items():
        remedy = "see whether HVDLITE_NATIVE=off or HVDLITE_ALLREDUCE=mpi helps, and report it"
        wrong_ranks = f"(wrong on ranks {[*problems]})"
        raise WrongResultError(f"{what}: rank {rank} {each} {wrong_ranks}; {remedy}")


def _slowest(seconds: Sequence[float]) -> list[float]:
    """Return the seconds of the slowest rank, call by call."""
    most = hvd.allreduce(np.array(seconds), name="bench.slowest", op=hvd.Max)
    return [float(each) for each in most]


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _show(text: str) -> None:
    """Print on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns on rank 0, the first to the left and the others to the right."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        _show("   ".join([first.ljust(widths[0]), *cells]))


def _size_text(nbytes: int) -> str:
    """Return a size as text, such as "64 KiB"."""
    factor, unit = next((f, u) for f, u in ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
                        if nbytes >= f)  # fmt: skip
    return f"{nbytes / factor:.4g} {unit}"


def _figure_text(seconds: float) -> str:
    """Return a figure of the model as text: a time, or a rate if it is the time of a byte."""
    if 0 < seconds < 1e-7:
        return f"{1e-9 / seconds:.3g} GB/s"
    return _time_text(seconds)


def _time_text(seconds: float) -> str:
    """Return a time as text, such as "123 us"."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
