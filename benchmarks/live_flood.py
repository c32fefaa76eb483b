"""What a flood of requests at `--metrics-port` costs a step of training.

    python benchmarks/live_flood.py            # 2 ranks, 1000 requests a second

A job runs with `--metrics-port`. In turns, a process asks it so often a second, or asks a socket
that nobody serves: what the process itself takes from the ranks, which would be the time of another
host, is in both. Prints the processor time of the launcher in both kinds of turns, and by how much
a step is longer with answers: the median over pairs of turns, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import math
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

WARM_SECONDS = 4.0
BACKLOG = 128  # As of the launcher's socket.
SCRIPT = """
import time
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
gradient, work = np.ones(100_000, np.float32), np.ones(20_000)
room = np.empty_like(work)
while True:  # Until the job is ended.
    began = time.monotonic()
    for _ in range(300):  # The same work in each step: some 10 ms.
        np.sqrt(work, out=room)
    hvd.allreduce(gradient, name="gradient")
    if hvd.rank() == 0:
        print("step", began, time.monotonic() - began, flush=True)
"""


def seconds_of(process: int) -> float:
    """Return the processor time of all threads of a process."""
    found = 0
    for thread in os.listdir(f"/proc/{process}/task"):
        with open(f"/proc/{process}/task/{thread}/schedstat", encoding="utf-8") as file:
            found += int(file.read().split()[0])
    return found * 1e-9


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
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    words = ["-np", str(options.ranks), "--metrics-port", "0", sys.executable, "-c", SCRIPT]
    printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe would fill
    job = subprocess.Popen(
        [sys.executable, "-m", "hvdlite.launcher", *words],
        stdout=printed, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert job.stderr is not None
    port = int(re.search(r":(\d+)/metrics", job.stderr.readline())[1])  # type: ignore[index]
    turns: list[tuple[float, float, bool, float]] = []
    asked = answered = 0
    time.sleep(WARM_SECONDS)
    for turn in range(2 * options.pairs):
        flooded = turn % 4 in (1, 2)  # Each kind is as often the first of its pair.
        with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as silent:
            began, cost = time.monotonic(), seconds_of(job.pid)
            to = port if flooded else silent.getsockname()[1]
            more, got = ask(to, options.rate, options.seconds)
            now = time.monotonic()
            turns.append((began, now, flooded, (seconds_of(job.pid) - cost) / (now - began)))
        if flooded:
            asked, answered = asked + more, answered + got
    job.terminate()
    job.wait()
    printed.seek(0)
    found = [line.split()[-2:] for line in printed if ":step " in line]
    print(f"{asked} requests, {answered} answers")
    steps_of: dict[bool, list[float]] = {False: [], True: []}
    for flooded in (False, True):
        shares = [100 * share for _, _, kind, share in turns if kind == flooded]
        for began, end, kind, _ in turns:
            if kind == flooded:
                steps = [float(took) for at, took in found if began <= float(at) < end]
                steps_of[flooded].append(statistics.median(steps))
        print(
            f"{'answers' if flooded else 'silence':8} launcher {statistics.median(shares):.2f} % "
            f"of a core ({min(shares):.2f} to {max(shares):.2f}), "
            f"step {duration(statistics.median(steps_of[flooded]))}"
        )
    longer = sorted(
        100 * (flooded / quiet - 1)
        for quiet, flooded in zip(steps_of[False], steps_of[True], strict=True)
    )
    count = len(longer)
    half = 0.98 * count**0.5  # Of the interval in which the median of as many others would be.
    low, high = max(int(count / 2 - half), 0), min(math.ceil(count / 2 + half), count - 1)
    print(
        f"a step is {statistics.median(longer):.2f} % longer with answers "
        f"(95 %: {longer[low]:.2f} to {longer[high]:.2f})"
    )


if __name__ == "__main__":
    main()
