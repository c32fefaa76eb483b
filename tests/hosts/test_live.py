"""The live view of a job on several hosts: what they send, and which of them is slow."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from hvdlite.common.base.metrics import MOST_CHARACTERS
from hvdlite.launcher.mpirun.mpi import find_all
from tests.hosts import faults, sites
from tests.hosts.jobs import ALL, FOREVER, in_the_middle
from tests.hosts.lab import ROOT, SHARED, Lab
from tests.hosts.sites import ThreeHosts
from tests.launcher.elastic.jobs import Watch
from tests.launcher.live.following import Followed

pytestmark = pytest.mark.timeout(120)
MESSAGES = 4
MS = r"[\d.]+ m?s"


class Gathered:
    """What each host has sent."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._number = watch, 0
        self.times: dict[str, list[float]] = defaultdict(list)
        self.ranks: dict[str, list[int]] = defaultdict(list)
        self.known: list[str] = []

    def wait_for(self, *hosts: str) -> None:
        """Wait until these hosts alone are known, and for some messages of each."""
        wanted = {host: len(self.times[host]) + MESSAGES for host in hosts}
        while self.known != [*hosts] or any(len(self.times[h]) < n for h, n in wanted.items()):
            line = self._watch.line(rf"gathered {self._number} ")
            _, host, ranks, size, at, known = line.partition("gathered ")[2].split()
            self._number += 1
            self.times[host].append(float(at))
            self.ranks[host].append(int(ranks))
            self.known = known.split(",")
            assert int(size) <= int(ranks) * MOST_CHARACTERS


def test_a_host_sends_one_message_a_second(
    site: ThreeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all its ranks together, also when another host takes its place."""
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(sites, "IMPATIENT", [sys.executable, "-m", "tests.hosts.counting"])
    flags = ("-np", "4", "--min-np", "2", "--metrics-port", "0")
    with site.elastic(*flags, *site.discovery("nodea:2", "nodeb:2")) as watch:
        gathered = Gathered(watch)
        gathered.wait_for("nodea", "nodeb")
        site.show("nodea:2", "nodec:2")
        gathered.wait_for("nodea", "nodec")
        assert site.end(watch) == 0
    for host, times in gathered.times.items():
        assert len(times) <= times[-1] - times[0] + 1.5, (host, times)
        assert max(gathered.ranks[host]) == 2, "those of both ranks go together"


ASK = """
import time
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.top.cli import running_jobs

((connection, _),), _ = running_jobs(EventLoop())
end = time.monotonic() + 20
while len(connection.ask_now(["look"])["ranks"]) < 3:
    assert time.monotonic() < end, connection.ask_now(["look"])
print(connection.ask_now(["stack", 2])["stack"])
print(connection.ask_now(["tensor", "x"])["ranks"], "ranks")
"""


@pytest.mark.skipif(next(find_all(os.environ), None) is None, reason="there is no mpirun")
def test_ranks_on_other_hosts_take_orders_under_mpirun(lab: Lab) -> None:
    """They begin to count, and tell their stacks, though the launcher has no pipe there."""
    runtime = {"XDG_RUNTIME_DIR": "/run"}
    words = ("--launcher=mpirun", "-H", ALL, sys.executable, "-c", FOREVER)
    with in_the_middle(lab, *words, **runtime) as job:
        done = lab.run("nodea", sys.executable, "-c", ASK, **runtime)
        job.signal(signal.SIGINT)
        job.finish(20)
    assert 'File "<string>", line' in done.stdout and "3 ranks" in done.stdout, done


def test_a_slow_host_and_a_slow_link_are_named(lab: Lab) -> None:
    pytest.importorskip("torch")
    file = Path(lab.folder / "shared" / "reason")
    inside = lab.write(file.name, "")
    command = [sys.executable, "-m", "tests.launcher.live.hasty", "-np", "4"]
    command += ["-H", "nodea:2,nodeb:2", "--metrics-port", "0", sys.executable, "-m"]
    command += ["tests.launcher.live.slowed_training", inside, "2", "512"]
    variables = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(SHARED / "inductor")}
    with lab.start("nodea", *command, **variables) as running:
        job = Followed(running.process, file)
        job.slow_down("data")
        slow = rf"ranks 2-3 \(host nodeb\) make the others wait {MS} a step \(.*\): "
        job.must_say(rf"{slow}their data takes {MS}, that of the others {MS}")
        with faults.slow_link(lab, "nodeb", mbit=20):
            job.slow_down("")
            job.must_say(
                rf"the link between hosts nodea and nodeb makes all ranks wait {MS} a step \(.*\): "
                r"\d+ TCP segments a second are sent again"
            )
        job.slow_down("end")
        assert running.finish(30).returncode == 0
