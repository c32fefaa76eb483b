"""What the tests fork is to them what they would start: see tests/forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.forks import NUMPY, forks, set_signals
from tests.launcher.elastic.jobs import Watch
from tests.launcher.jobs import start
from tests.parallel.jobs import environment

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux"),
    pytest.mark.timeout(60),
]
# Writes a line of JSON: what a process can find out about itself.
LOOK = """
import atexit, faulthandler, json, os, random, signal, sys, threading
import hvdlite.numpy
# Not SigQ, which counts what waits for any process of this user.
SIGNALS = "SigPnd", "SigBlk", "SigIgn", "SigCgt"
def read(name):
    with open(f"/proc/self/{name}", "rb") as file:
        return [word.decode() for word in file.read().split(b"\\0") if word]
print(json.dumps({
    "arguments": sys.argv, "name": __name__, "main": sys.modules["__main__"] is not None,
    "file": globals().get("__file__"), "is main": sys.modules["__main__"].__dict__ is globals(),
    "program": sys.executable, "path": sys.path, "environ": dict(os.environ),
    "command line": read("cmdline"), "initial environ": sorted(read("environ")),
    "folder": os.getcwd(), "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(),
    "signals": [each for each in open("/proc/self/status") if each.startswith(SIGNALS)],
    "interrupt": str(signal.getsignal(signal.SIGINT)),
    "descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
    "faults": faulthandler.is_enabled(), "errors": [sys.stdout.errors, sys.stderr.errors],
    "encoding": [sys.stdout.encoding, sys.stderr.encoding],
    "unbuffered": [sys.stdout.write_through, sys.stderr.write_through],
    "ours": sorted(name for name in sys.modules if name.partition(".")[0] == "hvdlite"),
}))
"""
Popen = type[subprocess.Popen[Any]]


@pytest.fixture(scope="module")
def forked() -> Popen:
    return forks(*NUMPY)


def run(popen: Popen, *words: str, folder: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    variables = how.pop("variables", {})
    process = popen(
        [sys.executable, *words], env=environment(**variables), cwd=folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how,
    )  # fmt: skip
    out, err = process.communicate(timeout=50)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def commands(folder: Path) -> Iterator[list[str]]:
    """Write a script and a module of the same lines; yield all ways to run them."""
    for name in ("look.py", "look_as_module.py"):
        (folder / name).write_text(LOOK)
    yield ["-c", LOOK, "word"]
    yield ["look.py", "word", "-x"]
    yield ["-m", "look_as_module", "word"]


@pytest.mark.parametrize("kind", range(3), ids=["program", "script", "module"])
def test_a_forked_process_finds_what_one_finds_that_is_started(
    forked: Popen, tmp_path: Path, kind: int
) -> None:
    words = list(commands(tmp_path))[kind]
    of_rank = {"HVDLITE_LAUNCHER_EVENTS": "token 0 /", "SOME": "thing"}
    python = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    ways: list[dict[str, Any]] = [
        {"variables": {**of_rank, **python}, "start_new_session": True},
        {"variables": of_rank, "preexec_fn": partial(set_signals, (signal.SIGINT, signal.SIGHUP))},
    ]
    for how in ways[: 2 - (kind > 0)]:
        found = []
        for popen in (subprocess.Popen, forked):
            done = run(popen, *words, folder=tmp_path, **how)
            assert (done.returncode, done.stderr) == (0, "")
            found.append(json.loads(done.stdout))
        started, was_forked = found
        # Python's own list may name a folder twice.
        assert [*dict.fromkeys(started.pop("path"))] == [*dict.fromkeys(was_forked.pop("path"))]
        assert was_forked == started


@pytest.mark.parametrize(
    "end",
    ["pass", "sys.exit(3)", "sys.exit('why')", "1 / 0", "os._exit(4)", "os.abort()",
     "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 15)", "raise KeyboardInterrupt",
     "atexit.register(print, 'the end')", "threading.Timer(0.1, print, 'x').start()"],
)  # fmt: skip
def test_it_ends_as_one_that_is_started(forked: Popen, tmp_path: Path, end: str) -> None:
    program = f"import atexit, os, sys, threading\nprint('said')\n{end}"
    started, was_forked = (
        run(popen, "-c", program, folder=tmp_path) for popen in (subprocess.Popen, forked)
    )
    assert was_forked.returncode == started.returncode
    assert was_forked.stdout == started.stdout
    assert was_forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_ranks_draw_different_random_numbers(forked: Popen, tmp_path: Path) -> None:
    program = "import random, numpy; print(random.random(), numpy.random.rand())"
    drawn = [run(forked, "-c", program, folder=tmp_path).stdout.split() for _ in range(2)]
    assert set(drawn[0]).isdisjoint(drawn[1])


@pytest.mark.parametrize(
    "variables", [{"PYTHONHASHSEED": "7"}, {"OMP_NUM_THREADS": "2"}, {"LD_LIBRARY_PATH": "/x"}]
)
def test_what_it_cannot_be_is_started(
    forked: Popen, tmp_path: Path, variables: dict[str, str]
) -> None:
    program = "import sys; print('numpy' in sys.modules)"
    assert run(forked, "-c", program, folder=tmp_path).stdout == "True\n"
    assert run(forked, "-c", program, folder=tmp_path, variables=variables).stdout == "False\n"
    assert run(forked, "-S", "-c", program, folder=tmp_path).stdout == "False\n"


@pytest.mark.parametrize("modules", [NUMPY, ()], ids=["forked", "started"])
def test_a_job_has_the_parents_that_it_has_otherwise(modules: tuple[str, ...]) -> None:
    """hvdlite-run is a child of the test, the agent one of it, and ranks are the agent's."""
    program = "import os, time; print('up', os.getpid(), flush=True); time.sleep(600)"
    with start("-np", "1", sys.executable, "-c", program, forked=modules) as process:
        watch = Watch(process)
        try:
            rank = int(watch.said(r"up (\d+)")[0])
            agent = parent_of(rank)
            assert parent_of(agent) == process.pid
            assert parent_of(process.pid) == os.getpid()
            os.kill(agent, signal.SIGKILL)  # The rank dies with it, as `start` will see.
            assert watch.finish() == 137
        finally:
            watch.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
