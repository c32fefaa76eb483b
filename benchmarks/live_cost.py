"""What counting for `hvd.metrics()` and the live view costs a step of training.

    python benchmarks/live_cost.py             # 2 ranks, a model of 10 layers

Tiny steps are made with and without counts in turns: the difference is what counting adds to a
step of any length, for as many gradients. Processor time of the thread, so that other work on the
machine counts for little. Prints it with its share of a step of 10 ms, and what the line that goes
to the launcher each second costs.
"""

from __future__ import annotations

import argparse
import statistics
import time

from jobs import run_ranks
from measuring import duration

STEP_SECONDS = 10e-3
STEPS = 20  # In each turn.


def rank_main(layers: int, rounds: int) -> list[float]:
    """Return the seconds that counting adds to a step, and those of one line for the launcher."""
    import torch

    import hvdlite.torch as hvd
    from hvdlite.common.base.metrics import Sample, pack
    from hvdlite.common.iterations.counts import Counts
    from hvdlite.common.runtime.current import current

    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    batch = torch.ones(4, 8)

    def steps(count: int) -> list[float]:
        took = []
        for _ in range(count):
            began = time.process_time()  # Of the engine's thread, too.
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            took.append(time.process_time() - began)
        return took

    steps(100)
    without, counted, later, lines = [], [], [], []
    for _ in range(rounds):
        without += steps(STEPS)
        counts = Counts(current())
        steps(3)  # They look for the model's outermost module.
        counts.settle()
        counted += steps(STEPS)
        began = time.thread_time()
        counts.settle()
        later.append((time.thread_time() - began) / STEPS)
        began = time.thread_time()
        pack(Sample(hvd.rank(), hvd.size(), counts.values()))
        lines.append(time.thread_time() - began)
        counts.stop()
        steps(1)
    added = statistics.median(counted) - statistics.median(without) + statistics.median(later)
    return [added, statistics.median(lines)]


def main() -> None:
    """Start the ranks, and print the figures of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    step, line = run_ranks(rank_main, options.ranks, options.layers, options.rounds)
    total = step / STEP_SECONDS + line
    print(f"a step: {duration(step)}, {100 * step / STEP_SECONDS:.2f} % of one of 10 ms")
    print(f"a line a second: {duration(line)}, {100 * line:.3f} %; together {100 * total:.2f} %")


if __name__ == "__main__":
    main()
