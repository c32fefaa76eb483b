"""Parts of `parameter_server.py`: slow workers, balance, snapshots and lost servers."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import duration
from ps_cluster import JOB_SECONDS, Job, Rows, running, spread_of, times_of
from resnet50 import SIZES

from hvdlite.ps.layout import place

COMPUTE_SECONDS, SLOW_SECONDS = 0.005, 0.02  # Of a step, and more of the slow worker's.


def measure_slow(args: argparse.Namespace) -> Rows:
    """See the top of `parameter_server.py`."""
    rates = {}
    for mode, staleness in (("sync", None), ("ssp", 4), ("async", None)):
        job = Job(
            workers=4, sizes="20x5000", mode=mode, staleness=staleness, slow=SLOW_SECONDS,
            compute=COMPUTE_SECONDS, wide=False, seconds=args.seconds,
            steps=max(20, round(args.seconds / SLOW_SECONDS)) if mode == "sync" else 1_000_000,
        )  # fmt: skip
        workers = times_of(job)
        # All have begun together, and the first one to end ends the measurement for all.
        begin = min(each[0][0] for each in workers)
        end = min(each[-1][1] for each in workers)
        count = sum(1 for each in workers for _, stop in each if stop <= end)
        rates[f"{mode}{'' if staleness is None else f'({staleness})'}"] = count / (end - begin)
    return [
        (f"one slow worker of 4, {name}", f"{rate:.0f} steps/s ({rate / rates['sync']:.2f})")
        for name, rate in rates.items()
    ]


def measure_balance(_args: argparse.Namespace) -> Rows:
    """See the top of `parameter_server.py`."""
    loads = []
    for servers in (2, 3, 4, 8):
        found = place(SIZES, [4] * len(SIZES), servers).loads()
        loads.append(f"{max(found) * servers / sum(found):.4f}")
    begin = time.perf_counter()
    parts = len(place([1000] * 100_000, [4] * 100_000, 8).parts)
    took = time.perf_counter() - begin
    return [
        ("largest load over the mean, ResNet-50 on 2, 3, 4, 8 servers", ", ".join(loads)),
        (f"layout of {parts:,} parts", duration(took)),
    ]


def measure_snapshot(args: argparse.Namespace) -> Rows:
    """See the top of `parameter_server.py`."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"HVDLITE_PS_SNAPSHOT": folder, "HVDLITE_PS_SNAPSHOT_EVERY": "5"}
        with running(Job(steps=2 * args.steps, variables=variables), Path(folder)) as cluster:
            cluster.wait()
        files = Path(folder).glob("server0.*.json")
        seconds = [each for file in files for each in json.loads(file.read_text())]
    return [("a snapshot of 97.5 MiB keeps the server for", spread_of(seconds))]


def measure_recovery(args: argparse.Namespace) -> Rows:
    """See the top of `parameter_server.py`."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"HVDLITE_PS_SNAPSHOT": folder, "HVDLITE_PS_SNAPSHOT_EVERY": "1"}
        job = Job(
            servers=2, sizes="20x5000", steps=250, compute=0.01, variables=variables, wide=False
        )
        with running(job, Path(folder)) as cluster:
            limit = time.monotonic() + JOB_SECONDS
            while not list(Path(folder).glob("server-0/*/*")):
                if time.monotonic() > limit or cluster.processes["worker0"].poll() is not None:
                    raise SystemExit("server 0 has saved nothing")
                time.sleep(0.01)
            time.sleep(0.5)
            killed = cluster.processes["server0"]
            killed_at = time.monotonic()
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            cluster.start("server", 0)
            steps = cluster.wait()[0]
        load = load_seconds()
    after = [end - start for start, end in steps if end > killed_at]
    if not after:
        raise SystemExit("the job had ended before the server was killed")
    longest = max(after)
    return [
        ("the step in which a server was killed took", duration(longest)),
        ("of which Python needs to import hvdlite and PyTorch", duration(load)),
    ]


def load_seconds() -> float:
    """Return how long a server needs until it runs the script at all."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, hvdlite.torch.ps"], check=True)
    return time.perf_counter() - begin
