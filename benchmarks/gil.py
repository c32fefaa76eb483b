"""What a training thread that runs pure Python, and so holds the GIL, loses to the engine.

    python benchmarks/gil.py                    # 2 ranks

The thread counts in a loop: with the engine idle, and with ResNet-50's 161 gradients enqueued just
before, in turns. Printed: how much longer the same loop takes with the engine at work, how much CPU
time the engine takes meanwhile (where all cores are busy, it has to come from somewhere), and how
long the gradients take beside the loop, and while the thread sleeps until they are there.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict
from typing import Any

from jobs import run_ranks
from measuring import Spread, duration, make_parser, slowest, table, write
from resnet50 import Gradients

import hvdlite.numpy as hvd

COUNTS_PER_LOOK = 5_000  # some 100 us: how exactly we know when the gradients were there
IDLE, BUSY = "engine idle", "engine at work"
LOOP, ENGINE, ASIDE, ASLEEP = "loop", "CPU of the engine", "beside the loop", "thread asleep"


def count() -> None:
    """Pure Python that never lets the GIL go by itself."""
    number = 0
    while number < COUNTS_PER_LOOK:
        number += 1


def loop(gradients: Gradients, looks: int) -> dict[str, float]:
    """Count, and look whether the gradients are there; how long it all took, in seconds."""
    start, own, process = time.perf_counter(), time.thread_time(), time.process_time()
    aside = 0.0
    for _ in range(looks):
        count()
        if not aside and gradients.here():
            aside = time.perf_counter() - start
    wall = time.perf_counter() - start
    engine = (time.process_time() - process) - (time.thread_time() - own)
    return {LOOP: wall, ENGINE: engine, ASIDE: aside or wall}


def turn(gradients: Gradients, state: str, looks: int) -> dict[str, float]:
    """One loop in this state of the engine."""
    hvd.barrier()
    start = time.perf_counter()
    gradients.enqueue()
    asleep = 0.0
    if state == IDLE:
        while not gradients.here():
            time.sleep(1e-4)
        asleep = time.perf_counter() - start
        hvd.barrier()
    taken = loop(gradients, looks)
    gradients.wait()
    return slowest([*taken, ASLEEP], [*taken.values(), asleep])


def measure(loop_seconds: float, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Run one rank; return the seconds of the slowest rank by state and figure."""
    hvd.init()
    gradients = Gradients()
    look_seconds = min(turn(gradients, IDLE, 100)[LOOP] / 100 for _ in range(3))
    looks = round(loop_seconds / look_seconds)
    lot = random.Random(0)
    measured: dict[str, dict[str, list[float]]] = {IDLE: {}, BUSY: {}}
    for _ in range(rounds):
        for state in lot.sample([IDLE, BUSY], 2):
            for figure, seconds in turn(gradients, state, looks).items():
                measured[state].setdefault(figure, []).append(seconds)
    return measured


def print_table(record: dict[str, Any]) -> None:
    """Print the loss, and how long the gradients take."""
    idle, busy = (
        {figure: Spread(**values) for figure, values in record[state].items()}
        for state in (IDLE, BUSY)
    )
    rows = [
        [f"loop, {IDLE}", str(idle[LOOP])],
        [f"loop, {BUSY}", str(busy[LOOP])],
        ["lost", f"{busy[LOOP].median / idle[LOOP].median - 1:.1%}"],
        [ENGINE, duration(busy[ENGINE].median - idle[ENGINE].median)],
        [f"gradients {ASIDE}", str(busy[ASIDE])],
        [f"gradients, {ASLEEP}", str(idle[ASLEEP])],
    ]
    print(table([f"{record['ranks']} ranks", ""], rows))


def main() -> None:
    parser = make_parser("What the engine takes from a thread in pure Python.", "gil", [2])
    parser.add_argument("--seconds", type=float, default=0.5, help="of one loop")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    records = []
    for ranks in args.ranks:
        measured = run_ranks(measure, ranks, args.seconds, args.rounds)
        record: dict[str, Any] = {"ranks": ranks, "loop_seconds": args.seconds}
        for state, figures in measured.items():
            record[state] = {name: asdict(Spread.quartiles(each)) for name, each in figures.items()}
        print_table(record)
        records.append(record)
    write(args.json, records)


if __name__ == "__main__":
    main()
