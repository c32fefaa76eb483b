"""Runs a script that was written for Horovod, and kills and adds workers from outside."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from tests.launcher.elastic.jobs import Watch
from tests.launcher.elastic_scenarios.sites import Site

EPOCHS, BATCHES = 8, 10
ENTERED = re.compile(r"\[\d+\]<stdout>:size (\d+) rank (\d+) pid (\d+)")
RESULT = re.compile(r"\[\d+\]<stdout>:result (\d+) (\d+) (\d+) (\S+) (.*)")


def wait_for_world(watch: Watch, size: int, seen: int) -> dict[int, int]:
    """Wait for the first whole world of a size after `seen` lines; return its pids by rank."""
    pids: dict[int, int] = {}

    def whole() -> bool:
        found = [match for line in watch.out[seen:] if (match := ENTERED.match(line))]
        pids.clear()
        pids.update((int(m[2]), int(m[3])) for m in found if int(m[1]) == size)
        return len(pids) == size

    watch._wait(whole, f"a world of {size}", 45)
    return pids


def train_through_two_kills_and_growth(script: str, site: Site) -> list[tuple[int, int, int]]:
    """Start 3 ranks on 3 hosts, kill rank 2, add a slot, kill the last one of the 3.

    Hosts that fail are out, as with Horovod. Return epoch, batch and steps of both that are left.
    """
    first, second, third = site.hosts
    hosts = site.discovery(f"{first}:1", f"{second}:1", f"{third}:1")
    path = Path(__file__).parent / "horovod_style" / f"{script}.py"
    words = ("--as-horovod", "-np", "3", "--min-np", "1", *hosts, "python", str(path))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    with site.launch(*words, **quiet) as watch:
        site.signal(third, wait_for_world(watch, 3, 0)[2], signal.SIGKILL)
        two = wait_for_world(watch, 2, 0)
        seen = len(watch.out)
        site.show(f"{first}:2", f"{second}:1")
        three = wait_for_world(watch, 3, seen)
        assert (three[0], three[2]) == (two[0], two[1])  # Ranks go host by host.
        seen = len(watch.out)
        site.signal(second, two[1], signal.SIGKILL)
        assert wait_for_world(watch, 2, seen) == {0: three[0], 1: three[1]}
        assert watch.finish(40) == 0, "\n".join([*watch.out, *watch.err])
    results = [match for line in watch.out if (match := RESULT.match(line))]
    assert len(results) == 2, "\n".join(watch.out)
    for match in results:
        assert match[5] == results[0][5]  # The weights.
        assert json.loads(match[5])
        assert abs(float(match[4]) - 1) < 1e-6  # The callbacks scale the learning rate.
    return [(int(match[1]), int(match[2]), int(match[3])) for match in results]
