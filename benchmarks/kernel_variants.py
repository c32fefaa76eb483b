"""How fast the kernels of a wheel are, beside the one that is compiled for this very processor.

    python benchmarks/kernel_variants.py            # a minute
    python benchmarks/kernel_variants.py --quick    # 10 seconds

Needs a C++ compiler. The ranks are threads, which the kernel does not notice: it runs without the
GIL. All variants are timed in turns, each with shared memory of its own, and what they compute is
compared before.

Prints a table (median and quartiles), and writes all figures to a JSON file.
"""

from __future__ import annotations

import platform
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Spread, Way, interleave, make_parser, parse, say, table, write

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Array, Members, Reduction
from hvdlite.common.collectives.native import kernel
from hvdlite.common.collectives.native.compiler import compile_library, find_compiler
from hvdlite.common.collectives.native.shm import Library
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.plain.adapter import numpy_dtype
from hvdlite.common.transport.inprocess import InProcessWorld

# What a compiler makes for the processor of this machine, and for one that has AVX2 alone.
COMPILED_HERE = {"x86_64": ("-march=native", "-march=haswell")}
SIZES = (64 << 10, 1 << 20, 64 << 20)
SUM = Reduction(ReduceOp.SUM)
Record = dict[str, Any]


class ThreadRanks:
    """Ranks that are threads of this process: `measuring.Ranks`."""

    def __init__(
        self, rank: int, meeting: threading.Barrier, values: list[Sequence[float]]
    ) -> None:
        self.rank, self.size = rank, meeting.parties
        self._meeting = meeting
        self._values = values  # by rank; all threads have the same list

    def barrier(self) -> None:
        """Wait for all threads."""
        self._meeting.wait()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all threads' values, element by element."""
        self._values[self.rank] = values
        self.barrier()
        result = [max(each) for each in zip(*self._values, strict=True)]
        self.barrier()
        return result


def in_threads(ranks: int, body: Callable[[int], None]) -> None:
    """Run `body(rank)` in a thread for each rank."""
    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def compile_all(folder: Path) -> dict[str, Library]:
    """Return what this machine can run of a wheel, and the kernel for its very processor."""
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("there is no C++ compiler")
    variants = kernel.candidates(platform.machine(), kernel.processor_features())
    own = COMPILED_HERE.get(platform.machine(), ("-march=native",))
    flags = {word: (*kernel.FLAGS, word) for word in own}
    flags |= {each.title: each.flags for each in variants}
    libraries = {}
    for number, (name, words) in enumerate(flags.items(), 1):
        path = folder / f"{number}.so"
        path.write_bytes(compile_library(compiler, kernel.sources(), words))
        libraries[name] = Library(str(path), name, number)
    return libraries


def measure(
    libraries: dict[str, Library], ranks: int, dtype: str, size: int, seconds: float
) -> list[Record]:
    """Return the figures of one allreduce by each library."""
    topology = Topology.single_host(ranks)
    worlds = {name: InProcessWorld(topology) for name in libraries}
    meeting, values = threading.Barrier(ranks), [()] * ranks
    taken: dict[str, list[float]] = {}
    sums: dict[tuple[str, int], bytes] = {}

    def way(name: str, rank: int) -> tuple[Way, Array]:
        backend = ShmBackend(worlds[name].transport(rank), libraries[name])
        members = Members(tuple(range(ranks)), rank, topology)
        generator = np.random.default_rng(rank)
        array = generator.standard_normal(size // numpy_dtype(dtype).itemsize)
        array = array.astype(numpy_dtype(dtype))
        result = np.empty_like(array)

        def reduce() -> None:
            backend.allreduce(members, [array], [result], SUM, lambda phase: nullcontext())

        return reduce, result

    def body(rank: int) -> None:
        ways = {}
        for name in libraries:
            ways[name], result = way(name, rank)
            for _ in range(3):
                ways[name]()
            sums[name, rank] = result.tobytes()
        found = interleave(ways, seconds, ThreadRanks(rank, meeting, values))
        if rank == 0:
            taken.update(found)

    in_threads(ranks, body)
    if len(set(sums.values())) != 1:
        raise SystemExit(f"{dtype}, {size} bytes: the variants do not give the same bits")
    return [
        {"ranks": ranks, "dtype": dtype, "bytes": size, "variant": name, "seconds": times}
        for name, times in ((name, asdict(Spread.quartiles(each))) for name, each in taken.items())
    ]


def main() -> None:
    """Measure, print and write."""
    parser = make_parser("How fast the kernels of a wheel are.", "kernel_variants", ranks=[2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=6, help="for a line of the table")
    args = parse(parser, "1 second for a line", seconds=1)
    records: list[Record] = []
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        libraries = compile_all(Path(folder))
        for ranks in args.ranks:
            for dtype in args.dtypes:
                for size in SIZES:
                    say(f"{ranks} ranks, {dtype}, {size} bytes")
                    found = measure(libraries, ranks, dtype, size, args.seconds)
                    records += found
                    times = [Spread(**each["seconds"]) for each in found]
                    ratios = [f"{each.median / times[0].median:.2f}" for each in times[1:]]
                    label = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
                    rows.append([str(ranks), dtype, label, str(times[0]), *ratios])
    print(table(["ranks", "dtype", "size", *libraries], rows))
    write(args.json, records)


if __name__ == "__main__":
    main()
