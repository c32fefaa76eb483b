"""What `--autotune` finds, and whether it beats the defaults: measured in turns, in one job.

    python benchmarks/autotune.py                 # two ranks on this host
    python benchmarks/autotune.py --two-hosts     # 2 + 2 ranks, 1 Gbit/s, 1 ms each way

A step hands over gradients one after another, as backward does on an accelerator (the ranks sleep
meanwhile), and waits for all of them. When the job has ended, the samples of the best and of the
defaults at the end of the log are compared: they were taken in turns. See `simulated_hosts` for
what the hosts need, and for their options.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jobs import environment, hvdlite_run, run_command
from measuring import Spread, make_parser, table, write
from simulated_hosts import TCP, add_link_options, two_hosts

import hvdlite.numpy as hvd
from hvdlite.common.decisions.autotuner import DUELS, MEASUREMENTS

SINGLE = 4  # samples of what is tuned one by one, at most


def rank_main(plan: argparse.Namespace) -> None:
    """Run as many steps as tuning takes, and one more sample."""
    samples = plan.warmup + plan.samples + SINGLE + 2 * DUELS + 1
    hvd.init()
    gradients = [np.ones(plan.kib << 8, np.float32) for _ in range(plan.gradients)]
    for _ in range(samples * (MEASUREMENTS * plan.steps + 1)):
        handles = []
        for number, gradient in enumerate(gradients):
            time.sleep(plan.backward_ms / 1000 / plan.gradients)
            handles.append(hvd.allreduce_async_(gradient, name=f"gradient.{number}"))
        for handle in handles:
            hvd.synchronize(handle)
    hvd.shutdown()


def run(args: argparse.Namespace) -> list[dict[str, str]]:
    """Run the job; return the lines of its log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "autotune.csv"
        tuned = {
            "HVDLITE_AUTOTUNE": "1",
            "HVDLITE_AUTOTUNE_LOG": str(log),
            "HVDLITE_AUTOTUNE_WARMUP_SAMPLES": str(args.warmup),
            "HVDLITE_AUTOTUNE_STEPS_PER_SAMPLE": str(args.steps),
            "HVDLITE_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": str(args.samples),
        }
        command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
        if args.two_hosts:
            with two_hosts(args) as hosts:
                hosts.run(TCP, command, **tuned)
        else:
            run_command([*hvdlite_run(2), *command], folder, environment() | tuned)
        with log.open() as file:
            return list(csv.DictReader(file))


def settings_of(line: dict[str, str]) -> tuple[str, ...]:
    """Return the settings of a line of the log, as text."""
    return tuple(value for name, value in line.items() if name != "score")


def compare(lines: list[dict[str, str]], step_bytes: int) -> dict[str, list[float]]:
    """Return the seconds of a step by the defaults and by the best, from the last samples."""
    duel = lines[-1 - 2 * DUELS : -1]
    defaults = settings_of(lines[0])
    rivals = {settings_of(each) for each in duel}
    if len(rivals) != 2 or defaults not in rivals:
        return {"defaults": [step_bytes / float(lines[-1]["score"]) / 1e6]}  # nothing was better
    seconds: dict[str, list[float]] = {"defaults": [], "best": []}
    for each in duel:
        name = "defaults" if settings_of(each) == defaults else "best"
        seconds[name].append(step_bytes / float(each["score"]) / 1e6)
    return seconds


def main() -> None:
    parser = make_parser("--autotune against the defaults.", "autotune")
    add = parser.add_argument
    add("--two-hosts", action="store_true", help="simulated, two ranks on each")
    add_link_options(parser, ranks=2, gbit=1, delay_ms=1)
    add("--gradients", type=int, default=60)
    add("--kib", type=int, default=64, help="of each gradient")
    add("--backward-ms", type=float, default=20)
    add("--samples", type=int, default=12, help="of the joint search")
    add("--warmup", type=int, default=1, help="samples that are dropped")
    add("--steps", type=int, default=5, help="of a measurement")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args)
        return
    lines = run(args)
    seconds = compare(lines, args.gradients * args.kib << 10)
    quartiles = {name: Spread.quartiles(each) for name, each in seconds.items()}
    where = f"two hosts, {args.gbit:g} Gbit/s" if args.two_hosts else "2 ranks"
    mib = args.gradients * args.kib / 1024
    print(f"{where}, {args.gradients} gradients, {mib:g} MiB, {args.backward_ms:g} ms backward\n")
    print(table(["", "step"], [[name, str(each)] for name, each in quartiles.items()]))
    kept = "defaults" if settings_of(lines[-1]) == settings_of(lines[0]) else "best"
    ratio = median(seconds["defaults"]) / median(seconds[kept])
    print(f"\nkept: the {kept}, {ratio:.2f} times as fast as the defaults: {lines[-1]}")
    records: list[dict[str, Any]] = [
        {"entry": name, "seconds": vars(each), "kept": name == kept}
        for name, each in quartiles.items()
    ]
    write(args.json, records)


if __name__ == "__main__":
    main()
