"""What a flood of requests at `--metrics-port` costs a step of training.

    python benchmarks/live_flood.py            # 2 ranks, 1000 requests a second

A job runs with `--metrics-port`. In turns nobody asks, and a process asks so often a second. Prints
the processor time of the launcher, which is what ranks may lack, the median step in both turns, and
by how much a step is longer than in the turn before. The process that asks needs processor time,
too, which would be that of another host: this is in the step.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from measuring import duration

TICKS = os.sysconf("SC_CLK_TCK")
WARM_SECONDS = 4.0
SCRIPT = """
import sys, time
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
gradient, work = np.ones(100_000, np.float32), np.ones(400_000)
for _ in range(int(sys.argv[1])):
    began = time.monotonic()
    while time.monotonic() - began < 10e-3:
        np.sqrt(work)
    hvd.allreduce(gradient, name="gradient")
    if hvd.rank() == 0:
        print("step", began, time.monotonic() - began, flush=True)
"""


def seconds_of(process: int) -> float:
    """Return the processor time of a process."""
    with open(f"/proc/{process}/stat", encoding="utf-8") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def ask(port: int, rate: int, seconds: float) -> tuple[int, int]:
    """Ask `rate` times a second; return how often it has asked, and got an answer."""
    waiting, began = selectors.DefaultSelector(), time.monotonic()
    asked = answered = 0
    while (now := time.monotonic()) < began + seconds:
        while asked < (now - began) * rate and len(waiting.get_map()) < 500:
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            waiting.register(client, selectors.EVENT_WRITE)
            asked += 1
        for key, events in waiting.select(1e-3):
            client = key.fileobj  # type: ignore[assignment]
            try:
                if events & selectors.EVENT_WRITE:
                    client.send(b"GET /metrics HTTP/1.1\r\n\r\n")
                    waiting.modify(client, selectors.EVENT_READ)
                    continue
                answered += bool(client.recv(1 << 16))
            except OSError:
                pass
            waiting.unregister(client)
            client.close()
        if len(waiting.get_map()) >= 500:  # Those that nobody answers give up.
            for key in list(waiting.get_map().values())[:100]:
                waiting.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    waiting.close()
    return asked, answered


def main() -> None:
    """Run the job and the turns, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    steps = int((2 * options.turns * options.seconds + WARM_SECONDS + 10) / 10e-3)
    words = ["-np", str(options.ranks), "--metrics-port", "0", sys.executable, "-c", SCRIPT]
    printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe would fill
    job = subprocess.Popen(
        [sys.executable, "-m", "hvdlite.launcher", *words, str(steps)],
        stdout=printed, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert job.stderr is not None
    port = int(re.search(r":(\d+)/metrics", job.stderr.readline())[1])  # type: ignore[index]
    turns: list[tuple[float, float, bool, float]] = []
    asked = answered = 0
    time.sleep(WARM_SECONDS)
    for turn in range(2 * options.turns):
        flooded, began, cost = bool(turn % 2), time.monotonic(), seconds_of(job.pid)
        if flooded:
            more, got = ask(port, options.rate, options.seconds)
            asked, answered = asked + more, answered + got
        else:
            time.sleep(options.seconds)
        now = time.monotonic()
        turns.append((began, now, flooded, (seconds_of(job.pid) - cost) / (now - began)))
    job.terminate()
    job.wait()
    printed.seek(0)
    found = [line.split()[-2:] for line in printed if ":step " in line]
    print(f"{asked} requests, {answered} answers")
    steps_of = [
        [float(length) for at, length in found if began <= float(at) < end]
        for began, end, _, _ in turns
    ]
    for flooded in (False, True):
        shares = [share for _, _, kind, share in turns if kind == flooded]
        took = [length for steps in steps_of[int(flooded) :: 2] for length in steps]
        low, high = 100 * min(shares), 100 * max(shares)
        print(
            f"{'flooded' if flooded else 'quiet':8} launcher {100 * statistics.median(shares):.2f} "
            f"% of a core ({low:.2f} to {high:.2f}), step {duration(statistics.median(took))}"
        )
    longer = [
        100 * (statistics.median(flooded) / statistics.median(quiet) - 1)
        for quiet, flooded in zip(steps_of[::2], steps_of[1::2], strict=True)
    ]
    low, middle, high = statistics.quantiles(longer, n=4)
    print(f"a step is {middle:.2f} % longer (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
