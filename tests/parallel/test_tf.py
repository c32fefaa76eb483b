"""TensorFlow on real ranks: few threads, other orders, and gradients that travel early."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel.jobs import MPI, TCP, ranks, run_command

pytest.importorskip("tensorflow", reason="the extra 'tensorflow' is not installed")
LIMIT_SECONDS = 240  # to build graphs of hundreds of operations takes its time
pytestmark = pytest.mark.timeout(LIMIT_SECONDS + 20)


def over_transports(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with both kinds of operations; those of Python over MPI in the soak only."""
    rare = pytest.param("off", MPI, marks=pytest.mark.soak)
    cases = [("off", TCP), ("auto", TCP), ("auto", MPI), rare]
    each = pytest.mark.parametrize(("native", "transport"), cases, indirect=["transport"])
    used: Callable[..., None] = pytest.mark.usefixtures("transport")(each(test))
    return used


def run(size: int, *arguments: str, lost: int = 0, **variables: str) -> None:
    worker = (sys.executable, "-m", "tests.parallel.worker_tf_graph", *arguments)
    command = ranks(size, *worker, preload=("tests.lean", "hvdlite.tf"))
    result = run_command(command, timeout=LIMIT_SECONDS, TF_CPP_MIN_LOG_LEVEL="2", **variables)
    assert lost or result.returncode == 0, result.stdout  # a lost rank is a failure
    assert result.stdout.count("is content") == size - lost, result.stdout


@pytest.mark.parametrize("native", ["off", "auto"])
def test_no_collective_keeps_another_from_its_start(native: str) -> None:
    run(2, "starvation", INTER_OP_THREADS="1", HVDLITE_TF_NATIVE=native)


@over_transports
def test_gradients_travel_while_backward_runs_until_a_rank_is_dead(
    native: str, tmp_path: Path
) -> None:
    """Whoever waits for the dead rank in a graph hears of it."""
    # Two threads: one of them sits in the gate that backward has to pass.
    path = str(tmp_path / "timeline.json")
    run(3, "overlap", path, lost=1, INTER_OP_THREADS="2", HVDLITE_TF_NATIVE=native)
