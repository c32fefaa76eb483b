"""What comparing the weights of all ranks costs (HVDLITE_CHECK_WEIGHTS).

    python benchmarks/check_weights.py             # 2 ranks, 100 steps from check to check

Steps with a comparison and without one are made in turns, by a small model and by one of 25 million
parameters, with Adam. Prints the medians and the range of both, and the share of every step that
one comparison in so many steps takes.
"""

from __future__ import annotations

import argparse
import statistics
import time

from jobs import run_ranks
from measuring import duration

MODELS = {"10 layers of 8 x 8": (10, 8, 300), "6 layers of 2048 x 2048": (6, 2048, 15)}


def rank_main(layers: int, width: int, rounds: int) -> list[list[float]]:
    """Return the seconds of steps without a comparison, and of steps with one."""
    import torch

    import hvdlite.torch as hvd
    from hvdlite.common.gradients.weights_check import WeightsCheck

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    plain = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    check = WeightsCheck("benchmark", hvd.global_process_set, 1)
    batch = torch.ones(16, width)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        return time.perf_counter() - began

    for _ in range(3):
        step()
    took: list[list[float]] = [[], []]
    for _ in range(rounds):
        for number, each in enumerate((None, check)):
            optimizer._weights_check = each
            took[number].append(step())
    return took


def main() -> None:
    """Start the ranks, and print the figures of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=100)
    options = parser.parse_args()
    for name, arguments in MODELS.items():
        took = run_ranks(rank_main, options.ranks, *arguments)
        without, checked = map(statistics.median, took)
        for what, times in zip(("without", "with a check"), took, strict=True):
            print(
                f"{name}: a step {what}: {duration(statistics.median(times))} "
                f"({duration(min(times))} to {duration(max(times))})"
            )
        share = 100 * (checked - without) / options.every / without
        print(f"{name}: {share:.2f} % of a step with a check every {options.every} steps")


if __name__ == "__main__":
    main()
