"""torch.distributed over hvdlite on several hosts, of which one is lost at the end."""

from __future__ import annotations

import re
import sys
import time

import pytest

from tests.hosts import faults
from tests.hosts.jobs import LAUNCHER, sentences
from tests.hosts.lab import ROOT, SHARED, Lab

PEER_SECONDS = 3
PLACES = "nodea:2,nodeb:1,nodec:1"


def test_a_process_group_on_three_hosts(lab: Lab) -> None:
    """One job, as PyTorch starts in each rank: features against one process, and a lost host."""
    pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    words = ("--launcher=ssh", "-H", PLACES, sys.executable, "-m", "tests.hosts.process_group")
    variables = {
        "PYTHONPATH": str(ROOT),
        "HVDLITE_PEER_TIMEOUT": str(PEER_SECONDS),
        "TORCHINDUCTOR_CACHE_DIR": str(SHARED / "inductor"),  # not in a temporary folder
    }
    with lab.start("nodea", *LAUNCHER, *words, cwd=ROOT, **variables) as running:
        out = running.process.stdout
        assert out is not None
        seen = ""
        while seen.count("up\n") < 4:
            line = out.readline()
            assert line, (seen, running.finish(10))
            seen += line
        placed = sorted(re.findall(r"placed (\d) (\d)", seen))
        assert placed == [("0", "3"), ("1", "1"), ("2", "3"), ("3", "3")]
        found = re.findall(r"FEATURE 4 (\w+) (.*)$", seen, re.MULTILINE)
        assert len(found) > 10 and {text.split(":")[0] for _, text in found} <= {"ok", "skip"}, seen
        started = time.monotonic()
        with faults.cut(lab, "nodec"):
            done = running.finish(40)
            assert time.monotonic() - started < PEER_SECONDS + 20
            assert done.returncode != 0 and re.search("rank 3|nodec", sentences(done)[-1]), done
            assert "rank 3" in done.stderr, done  # in the error of the ranks that waited for it
            lab.end_sessions("nodec")
