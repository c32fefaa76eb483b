"""Collectives at once and in programs, against numpy over the inputs of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import hvdlite.jax as hvd
from hvdlite.jax import programs
from tests.jax.cases import RANKS, Case, Outcomes, same, values

ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)
DTYPES = ("bfloat16", "float16", "float32", "int8", "int32", "uint8", "bool", "complex64")


def rows(rank: int) -> np.ndarray[Any, Any]:
    """The input of a rank."""
    return ROWS + 100 * rank


def every(of: Callable[[int], Any] = rows) -> list[Any]:
    """The inputs of all ranks."""
    return [of(rank) for rank in range(RANKS)]


def total(of: Callable[[int], Any] = rows) -> Any:
    return np.sum(every(of), axis=0)


MEAN = total() / RANKS
BEGIN = {0: 0, 1: 2, 2: 4}  # of the rows that a rank gets


def loop(x: Any) -> Any:
    def body(carry: Any, factor: Any) -> tuple[Any, Any]:
        reduced = hvd.allreduce(carry * factor)
        return reduced, reduced.sum()

    return jax.lax.scan(body, x, jnp.arange(1.0, 4.0))


def branch(x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, hvd.allreduce, lambda v: -v, x)


def squares(x: Any) -> Any:
    return (hvd.allreduce(x, op=hvd.Sum) ** 2).sum()


def again(x: Any) -> Any:
    inner = jax.jit(hvd.allreduce)
    return inner(x) + inner(2 * x)


def with_barrier(x: Any) -> Any:
    hvd.barrier()
    return x


# What is called, and what each rank gets.
VERBS: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any]]] = {
    "allreduce": (hvd.allreduce, lambda rank: MEAN),
    "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda rank: total()),
    "max": (lambda x: hvd.allreduce(x, op=hvd.Max), lambda rank: rows(2)),
    "min": (lambda x: hvd.allreduce(x, op=hvd.Min), lambda rank: rows(0)),
    "product": (
        lambda x: hvd.allreduce(x / 100, op=hvd.Product),
        lambda rank: np.prod(np.array(every()) / 100, axis=0),
    ),
    "scaled": (
        lambda x: hvd.allreduce(x, prescale_factor=2.0, postscale_factor=0.5),
        lambda rank: MEAN,
    ),
    "fp16": (lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), lambda rank: MEAN),
    "bf16": (
        lambda x: hvd.allreduce(jnp.ones(3), compression=hvd.Compression.bf16),
        lambda rank: np.ones(3),
    ),
    "grouped": (lambda x: hvd.grouped_allreduce([x, x[0]]), lambda rank: [MEAN, MEAN[0]]),
    "allgather": (hvd.allgather, lambda rank: np.concatenate(every())),
    "grouped_allgather": (
        lambda x: hvd.grouped_allgather([x, x[:, 0]]),
        lambda rank: (np.concatenate(every()), np.concatenate(every())[:, 0]),
    ),
    "broadcast": (lambda x: hvd.broadcast(x, 1), lambda rank: rows(1)),
    "reducescatter": (hvd.reducescatter, lambda rank: MEAN[2 * rank : 2 * rank + 2]),
    "uneven": (
        lambda x: hvd.reducescatter(x[:5], op=hvd.Sum),
        lambda rank: np.array_split(total()[:5], 3)[rank],
    ),
    "grouped_reducescatter": (
        lambda x: hvd.grouped_reducescatter([x]),
        lambda rank: [MEAN[2 * rank : 2 * rank + 2]],
    ),
    "alltoall": (
        hvd.alltoall,
        lambda rank: np.concatenate([each[2 * rank : 2 * rank + 2] for each in every()]),
    ),
    "scalar": (lambda x: hvd.allreduce(x[0, 0]), lambda rank: MEAN[0, 0]),
    "empty": (lambda x: hvd.allreduce(x[:0]), lambda rank: ROWS[:0]),
    "twice": (lambda x: hvd.allreduce(x) + hvd.allreduce(2 * x), lambda rank: 3 * MEAN),
    "grad": (jax.grad(squares), lambda rank: 2 * RANKS * total()),
    "vmap": (jax.vmap(hvd.allreduce), lambda rank: MEAN),
    "forward": (lambda x: jax.jvp(hvd.allreduce, (x,), (x,))[1], lambda rank: MEAN),
}


# Horovod's law: gradients are reduced as the values were; those of a gather are averaged.
TRACED: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any]]] = {
    "grad of compiled": (jax.grad(jax.jit(squares)), lambda rank: 2 * RANKS * total()),
    "grad of max": (
        jax.grad(lambda x: hvd.allreduce(x, op=hvd.Max).sum()),
        lambda rank: np.ones_like(ROWS),
    ),
    "grad of allgather": (
        jax.grad(lambda x: (hvd.allgather(x) ** 2).sum()),
        lambda rank: 2 * rows(rank),
    ),
    "grad of broadcast": (
        jax.grad(lambda x: (hvd.broadcast(x, 1) * 3).sum()),
        lambda rank: np.full_like(ROWS, 3 * (rank == 1)),
    ),
    "grad of reducescatter": (
        jax.grad(lambda x: hvd.reducescatter(x).sum()),
        lambda rank: np.ones_like(ROWS),
    ),
    "grad of alltoall": (
        jax.grad(lambda x: (hvd.alltoall(x) ** 2).sum()),
        lambda rank: 2 * rows(rank),
    ),
    "second derivative": (
        jax.grad(lambda y: jax.grad(squares)(y).sum()),
        lambda rank: np.full_like(ROWS, 2 * RANKS**2),
    ),
    "forward of gather": (
        lambda x: jax.jvp(hvd.allgather, (x,), (2 * x,))[1],
        lambda rank: 2 * np.concatenate(every()),
    ),
    "vmap of gather": (jax.vmap(hvd.allgather, 1, 1), lambda rank: np.concatenate(every())),
    "vmap of reducescatter": (
        jax.vmap(hvd.reducescatter, 1, 1),
        lambda rank: MEAN[2 * rank : 2 * rank + 2],
    ),
    "vmap of grad": (jax.vmap(jax.grad(squares)), lambda rank: 2 * RANKS * total()),
    "scan": (loop, lambda rank: (6 * MEAN, np.array([1, 2, 6]) * MEAN.sum())),
    "grad of scan": (
        jax.grad(lambda x: loop(x)[0].sum()),
        lambda rank: np.full_like(ROWS, 6),
    ),
    "loop": (
        lambda x: jax.lax.fori_loop(0, 3, lambda i, v: hvd.allreduce(v + i), x),
        lambda rank: MEAN + 3,
    ),
    "while": (
        lambda x: jax.lax.while_loop(lambda v: v.sum() < 1e5, lambda v: 2 * hvd.allreduce(v), x),
        lambda rank: 128 * MEAN,
    ),
    "cond": (branch, lambda rank: MEAN),
    "grad of cond": (jax.grad(lambda x: branch(x).sum()), lambda rank: np.ones_like(ROWS)),
    "checkpoint": (
        jax.grad(jax.checkpoint(lambda v: (hvd.allreduce(v) ** 2).sum())),
        lambda rank: 2 * MEAN,
    ),
    "function twice": (again, lambda rank: 3 * MEAN),
    "barrier": (with_barrier, rows),
    "constant": (lambda x: x + hvd.allreduce(np.float32(3)), lambda rank: rows(rank) + 3),
    "unused": (lambda x: (hvd.allreduce(x), x)[1], rows),
    "grad beside integers": (
        jax.grad(lambda x: hvd.grouped_allreduce([x, jnp.arange(3)], op=hvd.Sum)[0].sum()),
        lambda rank: np.full_like(ROWS, RANKS),
    ),
    "grad of max beside integers": (
        jax.grad(lambda x: hvd.grouped_allreduce([x, jnp.arange(3)], op=hvd.Max)[0].sum()),
        lambda rank: np.ones_like(ROWS),
    ),
}


def of_dtype(dtype: str, rank: int) -> Any:
    return (np.arange(5) + rank).astype(getattr(ml_dtypes, dtype, dtype))


def reduced_dtype(dtype: str) -> Any:
    if dtype == "bool":
        return np.any(every(lambda rank: of_dtype(dtype, rank)), axis=0)
    return total(lambda rank: of_dtype(dtype, rank).astype(np.complex64)).real.astype(np.float32)


def of_all_dtypes(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        dtype: hvd.allreduce(each, op=hvd.Max if dtype == "bool" else hvd.Sum)
        for dtype, each in inputs.items()
    }


def program(x: Any) -> dict[str, Any]:
    """All of it in one program."""
    return {name: call(x) for name, (call, _) in [*VERBS.items(), *TRACED.items()]}


def now(rank: int) -> dict[str, Any]:
    x = rows(rank)
    return {
        **{name: call(x) for name, (call, _) in VERBS.items()},
        "async": hvd.synchronize(hvd.allreduce_async(x)),
        "ragged": hvd.allgather(x[: rank + 1]),
        "splits": hvd.alltoall(x, [1, 2, 3]),
    }


def in_python(rank: int) -> Any:
    """Where nothing can be compiled."""

    def another(x: Any) -> Any:
        return program(x)

    with patch.object(programs, "served_library", lambda: None):
        return jax.jit(another)(rows(rank))


def dtypes(rank: int) -> Any:
    inputs = {dtype: of_dtype(dtype, rank) for dtype in DTYPES}
    reduced = jax.jit(of_all_dtypes)(inputs)
    assert {name: each.dtype for name, each in reduced.items()} == {
        name: each.dtype for name, each in inputs.items()
    }
    return {name: each.astype(np.complex64) for name, each in reduced.items()}


def late(x: Any) -> Any:
    """A sum over ranks, after so much work that JAX goes on with the script before."""
    square = jnp.full((512, 512), x[0, 0])
    for _ in range(8):
        square = square @ square * 0
    return hvd.allreduce(x + square[0, 0], op=hvd.Sum, name="late")


def soon(x: Any) -> Any:
    return hvd.allreduce(x, op=hvd.Sum, name="late")


def join_after(rank: int) -> Any:
    result = jax.jit(late if rank == 0 else soon)(rows(rank))
    hvd.join()
    return result


def barrier_after(rank: int) -> Any:
    result = jax.jit(late)(rows(rank))
    hvd.barrier()
    return result.is_ready()


def cases(folder: Path) -> dict[str, Case]:
    return {
        "now": now,
        "compiled": lambda rank: jax.jit(program)(rows(rank)),
        "in Python": in_python,
        "dtypes": dtypes,
        "donated": lambda rank: jax.jit(hvd.allreduce, donate_argnums=0)(jnp.array(rows(rank))),
        "join after": join_after,
        "barrier after": barrier_after,
        "join": lambda rank: jax.jit(hvd.join)(),
    }


NOW: dict[str, Callable[[int], Any]] = {
    "async": lambda rank: MEAN,
    "ragged": lambda rank: np.concatenate([rows(other)[: other + 1] for other in range(RANKS)]),
    "splits": lambda rank: (
        np.concatenate([np.split(rows(other), [1, 3])[rank] for other in range(RANKS)]),
        np.full(3, rank + 1),
    ),
}


def named(how: str, names: Iterable[str]) -> list[Any]:
    return [pytest.param(how, name, id=f"{how}-{name}") for name in names]


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *named("now", [*VERBS, *NOW]),
        *named("compiled", [*VERBS, *TRACED]),
        *named("in Python", [*VERBS, *TRACED]),
    ],
)
def test_a_collective(how: str, name: str, outcomes: Outcomes) -> None:
    wanted = NOW[name] if name in NOW else {**VERBS, **TRACED}[name][1]
    for rank, found in enumerate(values(outcomes, how)):
        same(found[name], wanted(rank), 2e-3 if name == "fp16" else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype(dtype: str, outcomes: Outcomes) -> None:
    for found in values(outcomes, "dtypes"):
        same(found[dtype], reduced_dtype(dtype))


def test_the_memory_of_an_input_may_be_overwritten(outcomes: Outcomes) -> None:
    for found in values(outcomes, "donated"):
        same(found, MEAN)


def test_join_tells_all_ranks_the_same_in_a_program(outcomes: Outcomes) -> None:
    last = {int(found) for found in values(outcomes, "join")}
    assert len(last) == 1 and last <= set(range(RANKS))


def test_join_and_barrier_come_after_the_programs_before_them(outcomes: Outcomes) -> None:
    for found in values(outcomes, "join after"):
        same(found, total())
    assert all(values(outcomes, "barrier after"))
