"""What is wrong is said on all ranks, and nothing hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hvdlite.jax as hvd
from hvdlite.common.api.options import CallOptions
from hvdlite.jax import programs
from hvdlite.jax.calls import Call
from hvdlite.jax.mpi_ops import signal
from hvdlite.jax.native.executions import served_library
from hvdlite.jax.starting import Started
from tests.jax.cases import RANKS, Case, Outcomes, values
from tests.limits import HANG_SECONDS

ROW = jnp.ones(4)


def first(x: Any) -> Any:
    return hvd.allreduce(x)


def second(x: Any) -> Any:
    return hvd.allreduce(2 * x)


def gathering(x: Any) -> Any:
    return hvd.allgather(x)


def exchanging(x: Any) -> Any:
    return hvd.alltoall(jnp.ones(3))


def of_two(x: Any) -> Any:
    return hvd.grouped_allreduce([x, x + 1])


def of_three(x: Any) -> Any:
    return hvd.grouped_allreduce([x, x + 1, x + 2])


def waiting(x: Any) -> Any:
    return x + signal("barrier", hvd.global_process_set)


def one_after_another(x: Any) -> Any:
    return hvd.allreduce(hvd.allgather(x))


def two_after_one(x: Any) -> Any:
    """What fails is the first, and the others are never taken."""
    failing = hvd.allreduce(x, name="failing")
    return hvd.allreduce(ROW, name="other") + hvd.allreduce(ROW * failing.sum(), name="third")


def then_another(rank: int) -> Any:
    """The first program has so much work that JAX runs it beside the script."""

    def failing(x: Any) -> Any:
        square = jnp.ones((512, 512)) * x[0]
        return hvd.allreduce(x + (square @ square)[0, 0], name="late")

    with pytest.raises(jax.errors.JaxRuntimeError, match="disagree on shape"):
        jax.block_until_ready(jax.jit(failing)(jnp.ones(3 + rank % 2)))
    return jax.jit(hvd.allreduce)(ROW * rank)


def unused_memory(rank: int) -> Any:
    """How many bytes lie about after collectives of many sizes."""
    for count in range(10):
        jax.block_until_ready(jax.jit(hvd.allreduce)(jnp.ones((1 << 18) + 1024 * count)))
    return served_library().unused_bytes()


def updated(gradient: Any) -> Any:
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), op=hvd.Max)
    return optimizer.update(gradient, optimizer.init(gradient))[0]


def on_a_removed_set(rank: int) -> Any:
    """The set that has its id now has the same ranks, and is another one."""
    removed = hvd.add_process_set([0, 1])
    on_it = jax.jit(lambda x: hvd.allreduce(x, process_set=removed))
    on_another = jax.jit(lambda x: hvd.allreduce(x, process_set=another))
    try:
        if rank < 2:
            jax.block_until_ready(on_it(ROW))
        hvd.barrier()
        hvd.remove_process_set(removed)
        another = hvd.add_process_set([0, 1])
        if rank < 2:
            jax.block_until_ready(on_another(ROW))
            return jax.block_until_ready(on_it(ROW))
        raise jax.errors.JaxRuntimeError("not registered: of no interest here")
    finally:
        hvd.barrier()
        hvd.remove_process_set(another)


WRONG: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "shape": (
        lambda rank: jax.jit(lambda x: hvd.allreduce(x, name="a"))(jnp.ones(3 + rank % 2)),
        "JaxRuntimeError", r"disagree on shape: .*\(3,\).* rank 1 has \(4,\)",
    ),
    "rows": (
        lambda rank: jax.jit(hvd.allgather)(jnp.ones(3 + (rank == 0))),
        "JaxRuntimeError", r"compiled for a result of the shape \[\d+\], and it has \[10\]: inside",
    ),
    "dtype": (
        lambda rank: jax.jit(hvd.allreduce)(jnp.ones(3, jnp.float8_e4m3fn)),
        "ValueError", "Tensor type float8_e4m3fn is not supported",
    ),
    "bool": (lambda rank: jax.jit(hvd.allreduce)(ROW > 0), "ValueError", "Average of bool"),
    "root": (
        lambda rank: jax.jit(lambda x: hvd.broadcast(x, 5))(ROW),
        "ValueError", "invalid root rank 5",
    ),
    "tracer": (
        lambda rank: jax.jit(hvd.allreduce_async)(ROW),
        "ValueError", "allreduce_async needs values, and this array is traced",
    ),
    "parameters": (
        lambda rank: jax.jit(hvd.broadcast_parameters)(ROW),
        "ValueError", "call it outside of jax.jit",
    ),
    "vmap": (
        lambda rank: jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum))(jnp.ones((2, 3))),
        "ValueError", "Adasum treats a tensor as a whole",
    ),
    "splits": (
        lambda rank: jax.jit(lambda x: hvd.alltoall(x, [1, 3, 0]))(ROW),
        "ValueError", "a compiled program cannot have splits",
    ),
    "traced splits": (
        lambda rank: jax.jit(hvd.alltoall)(ROW, jnp.array([1, 3, 0])),
        "ValueError", "a compiled program cannot have splits",
    ),
    "gpu": (
        lambda rank: jax.jit(hvd.allreduce).trace(ROW).lower(lowering_platforms=("cuda",)),
        "NotImplementedError", "allreduce: programs for cuda cannot have collectives",
    ),
    "programs": (
        lambda rank: jax.jit([first, second][rank % 2])(ROW),
        "JaxRuntimeError", "rank 0 has program jit_first, rank 1 has program jit_second",
    ),
    **{
        f"{one.__name__} and {other.__name__}": (
            lambda rank, both=(one, other): jax.jit(both[rank % 2])(ROW),
            "JaxRuntimeError",
            rf"ranks disagree on {what}.*: rank 0 has .*program jit_{one.__name__}\b.*"
            rf"rank 1 has .*program jit_{other.__name__}\b",
        )
        for one, other, what in (
            (first, gathering, "the operation"),
            (gathering, one_after_another, "settings"),
            (first, one_after_another, "the operation"),
            (waiting, first, "the operation"),
            (exchanging, first, "the operation"),
        )
    },
    **{
        f"{one.__name__} and {other.__name__}": (
            lambda rank, both=(one, other): jax.jit(both[rank % 2])(ROW),
            "JaxRuntimeError",
            # Sizes are compared as soon as two are known, of whichever ranks are the first.
            r"ranks disagree on the number of tensors.*: "
            rf"(rank 0 has .*program jit_{one.__name__}\b.*rank 1 has .*jit_{other.__name__}\b"
            rf"|rank 1 has .*program jit_{other.__name__}\b.*rank 2 has .*jit_{one.__name__}\b)",
        )
        for one, other in ((of_two, of_three), (first, of_two))
    },
    "in the middle": (
        lambda rank: jax.jit(two_after_one)(jnp.ones(3 + rank % 2)),
        "JaxRuntimeError", "ranks disagree on shape",
    ),
    "uneven": (lambda rank: jax.jit(hvd.alltoall)(ROW), "ValueError", "4 rows cannot be"),
    "forward": (
        lambda rank: jax.jvp(lambda x: hvd.allreduce(x, op=hvd.Max), (ROW,), (ROW,)),
        "TypeError", "forward-mode",
    ),
    "forward of an update": (
        lambda rank: jax.jvp(updated, (ROW,), (ROW,)), "TypeError", "forward-mode",
    ),
    "removed": (on_a_removed_set, "JaxRuntimeError", "not registered"),
    "no rows": (
        lambda rank: jax.jit(hvd.allgather)(ROW[0]),
        "ValueError", r"without dimensions has no rows: give it one, as x\[None\]",
    ),
    "no parts": (
        lambda rank: jax.jit(hvd.alltoall)(ROW[0]),
        "ValueError", r"without dimensions has no rows: give it one, as x\[None\]",
    ),
}  # fmt: skip


def cases(folder: Path) -> dict[str, Case]:
    found: dict[str, Case] = {}
    again = jax.jit(hvd.allreduce)
    for name, (call, _, _) in WRONG.items():
        found[name] = call
        # The job goes on, and programs can be run again.
        found[f"after {name}"] = lambda rank: again(ROW * rank)
    found["memory"] = unused_memory
    found["then another"] = then_another
    found["open"] = lambda rank: served_library().open_tickets()
    return found


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake(outcomes: Outcomes, name: str) -> None:
    _, error, text = WRONG[name]
    for outcome in outcomes:
        assert outcome[name].error == error, outcome[name].text
        assert re.search(text, outcome[name].text), outcome[name].text
        assert list(outcome[f"after {name}"].value) == [(RANKS - 1) / 2] * 4


def test_a_program_that_has_failed_leaves_the_next_one_alone(outcomes: Outcomes) -> None:
    for found in values(outcomes, "then another"):
        assert list(found) == [(RANKS - 1) / 2] * 4


def test_memory_of_many_sizes_is_given_back(outcomes: Outcomes) -> None:
    for found in values(outcomes, "memory"):
        assert 1 << 20 <= found <= 3 << 20, "one collective of 1 MB at a time"


class _Ending:
    """A handle that notes that it was waited for."""

    def __init__(self, error: str, ended: list[str]) -> None:
        self._error, self._ended = error, ended

    def ended_within(self, seconds: float) -> bool:
        self._ended.append(self._error)
        return True

    def wait(self) -> None:
        if self._error:
            raise ValueError(self._error)


def test_all_have_ended_when_the_first_error_is_raised() -> None:
    ended: list[str] = []
    errors = ("", "first", "second", "")
    started = [Started([_Ending(error, ended)]) for error in errors]  # type: ignore[list-item]
    call = Call("allreduce", CallOptions(hvd.global_process_set))
    arrays = [np.ones(2, np.float32)] * len(errors)
    with (
        patch.object(programs, "start_now", side_effect=started),
        pytest.raises(ValueError, match="first"),
    ):
        programs.run_now(arrays, [call] * len(errors), [1] * len(errors))
    assert ended == [*errors]


def test_what_a_program_that_failed_has_started_is_forgotten(outcomes: Outcomes) -> None:
    assert values(outcomes, "open") == [0] * RANKS


def run_script(folder: Path, script: str, *, ranks: int) -> subprocess.CompletedProcess[str]:
    """Return what a job of hvdlite-run has said and come to."""
    (folder / "script.py").write_text(script)
    words = ["-m", "hvdlite.launcher", "-np", str(ranks), sys.executable, "script.py"]
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


SCRIPT = """
import jax, jax.numpy as jnp, hvdlite.jax as hvd
hvd.init()
step = jax.jit(lambda x: hvd.allreduce(x, name="step"))
step(jnp.ones(3))
if hvd.rank() == 1:
    raise KeyError("my own mistake")
step(jnp.ones(3)).block_until_ready()
"""


def test_a_rank_that_fails_ends_the_programs_of_others(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT, ranks=2)
    assert done.returncode == 1
    assert "rank 1 failed: KeyError: 'my own mistake'" in done.stderr
    assert "rank 1 has ended by KeyError" in done.stderr, "said where rank 0 waited"


FEWER = """
import jax, jax.numpy as jnp, hvdlite.jax as hvd
hvd.init()
@jax.jit
def step(x):
    x = hvd.allreduce(x)
    return x if hvd.rank() == 1 else hvd.allreduce(x)
for number in range(3):
    try:
        step(jnp.ones(3)).block_until_ready()
        print(f"{hvd.rank()}.{number} is fine")
    except jax.errors.JaxRuntimeError as error:
        print(f"{hvd.rank()}.{number}", error)
"""


def test_a_rank_with_fewer_collectives_is_named_on_all_ranks(tmp_path: Path) -> None:
    """While it waits in its next program, and when it has ended."""
    done = run_script(tmp_path, FEWER, ranks=3)
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"(\d\.\d) (.*)", done.stdout))
    for place in ("0.0", "1.1", "2.0"):
        assert (
            "one of them fewer collectives: rank 0 waits in allreduce 'program.2' of "
            in (said[place])
        )
        assert "and rank 1 in allreduce 'program.1' of program jit_step, to which" in said[place]
    assert said["1.0"] == said["1.2"] == "is fine"
    assert all(re.search("rank [12] has been shut down", said[place]) for place in ("0.1", "0.2"))


ENDING = """
import sys, jax, jax.numpy as jnp, hvdlite.jax as hvd
hvd.init()
def late(x):
    square = jnp.ones((512, 512)) * hvd.rank()
    for _ in range(30):
        square = square @ square * 0
    return hvd.allreduce(x + square[0, 0], op=hvd.Sum)
def soon(x):
    return hvd.allreduce(x, op=hvd.Sum)
soon.__name__ = "late"
result = jax.jit(soon if hvd.rank() == 1 else late)(jnp.ones(3))
if hvd.rank() == 1:
    print("sum", float(result.sum()))
if hvd.rank() == 2:
    hvd.shutdown()
"""


def test_ranks_leave_when_their_programs_have_ended(tmp_path: Path) -> None:
    done = run_script(tmp_path, ENDING, ranks=3)
    assert (done.returncode, done.stderr) == (0, "")
    assert "sum 9.0" in done.stdout
