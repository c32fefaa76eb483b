"""TensorFlow, and Keras 3 with it, on real ranks: training, few threads, early gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.parallel.jobs import Job, Jobs, ranks, run_command

pytest.importorskip("tensorflow", reason="the extra 'tensorflow' is not installed")
pytest.importorskip("keras", reason="the extra 'tensorflow' is not installed")
LIMIT_SECONDS = 240  # to build graphs of hundreds of operations takes its time
pytestmark = pytest.mark.timeout(LIMIT_SECONDS + 20)
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def worker(name: str, *words: object) -> tuple[str, ...]:
    return (sys.executable, "-m", f"tests.parallel.{name}", *map(str, words))


def with_threads(number: int, native: str) -> dict[str, str]:
    """The variables of a job whose graphs have so many threads, and compiled operations or none."""
    return {"INTER_OP_THREADS": str(number), "HVDLITE_TF_NATIVE": native}


@pytest.fixture(scope="module")
def over_tcp(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """One import of TensorFlow and Keras for all."""
    timelines = tmp_path_factory.mktemp("timelines")
    jobs = {"training": Job(2, worker("worker_tf")), "Keras 3": Job(2, worker("worker_keras"))}
    for native in ("off", "auto"):
        graph = worker("worker_tf_graph", "starvation")
        jobs[f"starvation, {native}"] = Job(2, graph, with_threads(1, native))
        early = worker("worker_tf_graph", "overlap", timelines / native)
        # Two threads: one of them sits in the gate that backward has to pass.
        jobs[f"early gradients, {native}"] = Job(3, early, with_threads(2, native))
    return Jobs(jobs, ("tests.lean", "hvdlite.tf", "tests.keras.training"), LIMIT_SECONDS, **QUIET)


@pytest.mark.parametrize(
    ("name", "size"),
    [("training", 2), ("Keras 3", 2), ("starvation, off", 2), ("starvation, auto", 2)],
)
def test_all_ranks_are_content(name: str, size: int, over_tcp: Jobs) -> None:
    """They train as one process would, and no collective keeps another one from its start."""
    result = over_tcp.result(name)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout


@pytest.mark.parametrize("native", ["off", "auto"])
def test_gradients_travel_while_backward_runs_until_a_rank_is_dead(
    native: str, over_tcp: Jobs
) -> None:
    """Whoever waits for the dead rank in a graph hears of it."""
    result = over_tcp.result(f"early gradients, {native}")
    assert result.stdout.count("is content") == 2, result.stdout


@pytest.mark.usefixtures("over_mpi")
@pytest.mark.parametrize("native", [pytest.param("off", marks=pytest.mark.soak), "auto"])
def test_training_and_early_gradients_over_mpi(native: str, tmp_path: Path) -> None:
    """In the same processes, of which the first hears that the second is dead."""
    command = ranks(2, *worker("worker_tf", tmp_path / "timeline"))
    result = run_command(command, timeout=LIMIT_SECONDS, **with_threads(2, native), **QUIET)
    assert result.stdout.count("has trained") == 2, result.stdout
    assert result.stdout.count("is content") == 1, result.stdout
