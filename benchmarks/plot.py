"""Draws time and bus bandwidth over size, from the file that collectives.py writes.

    python benchmarks/plot.py collectives.json -o docs/images/allreduce.png --ranks 2

Needs the extra plot. A line is a library: the median of its jobs; its shade goes from the least to
the most of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

mpl.use("agg")
UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
Record = dict[str, Any]


def size_text(nbytes: int) -> str:
    """Return a size as text, such as "64 KiB"."""
    unit, factor = next((each for each in UNITS if nbytes >= each[1]), UNITS[-1])
    return f"{nbytes / factor:g} {unit}"


def time_text(seconds: float, _position: int | None = None) -> str:
    """Return a time as text, such as "10 ms"."""
    factor, unit = next(each for each in ((1, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))
                        if seconds * each[0] >= 0.999)  # fmt: skip
    return f"{seconds * factor:g} {unit}"


def select(records: Sequence[Record], args: argparse.Namespace) -> dict[str, list[Record]]:
    """Return the records of each entry by size; sets of tensors have no place on the axis."""
    lines: dict[str, list[Record]] = {}
    wanted = (args.ranks, args.collective, args.dtype)
    for record in sorted(records, key=lambda each: each["nbytes"]):
        found = (record["ranks"], record["collective"], record["dtype"])
        if found == wanted and not record["size"].startswith("ResNet"):
            lines.setdefault(record["entry"], []).append(record)
    return lines


def draw_line(axes: Sequence[Axes], entry: str, line: Sequence[Record]) -> None:
    """Draw one library: time in the first axes, bandwidth in the second."""
    sizes = [each["nbytes"] for each in line]
    low, median, high = (
        [each["seconds"][key] for each in line] for key in ("low", "median", "high")
    )
    bus = [each["bus_bytes_per_second"] * each["seconds"]["median"] for each in line]
    style = {"color": "0.6", "linestyle": "--"} if entry == "copy" else {"marker": "o", "ms": 4}
    (drawn,) = axes[0].plot(sizes, median, label=entry, **style)
    axes[0].fill_between(sizes, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)

    def rate(seconds: Sequence[float]) -> list[float]:
        return [nbytes / each / 1e9 for nbytes, each in zip(bus, seconds, strict=True)]

    axes[1].plot(sizes, rate(median), **style | {"color": drawn.get_color()})
    axes[1].fill_between(
        sizes, rate(high), rate(low), color=drawn.get_color(), alpha=0.15, linewidth=0
    )


def draw(lines: dict[str, list[Record]], title: str, path: Path) -> None:
    """Write the picture."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for entry, line in lines.items():
        draw_line(axes, entry, line)
    sizes = sorted({each["nbytes"] for line in lines.values() for each in line})
    for each in axes:
        each.set_xscale("log", base=2)
        each.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45)
        each.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter(FuncFormatter(time_text))
    axes[0].set_title("time: lower is better")
    axes[0].legend(frameon=False)
    # A copy in the cache is ten times faster than anything that goes to another process.
    top = max(each["bus_bytes_per_second"] for entry, line in lines.items() if entry != "copy"
              for each in line)  # fmt: skip
    axes[1].set_ylim(0, 1.6 * top / 1e9)
    axes[1].set_title("bus bandwidth, GB/s: higher is better")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw the figures of collectives.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="what collectives.py has written")
    parser.add_argument("-o", "--output", type=Path, default=Path("collectives.png"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--collective", default="allreduce")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    result = json.loads(args.file.read_text())
    lines = select(result["records"], args)
    title = f"{args.collective} of {args.dtype}, {args.ranks} ranks"
    if not lines:
        parser.error(f"{args.file} has no {title}")
    draw(lines, f"{title}, {result['machine']['cores']} cores", args.output)


if __name__ == "__main__":
    main()
