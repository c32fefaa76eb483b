"""Steps that all ranks do together: they all succeed, or all raise.

Their exchanges have the same names in every call, so that ranks which make different calls are told
so instead of waiting for each other. Therefore threads of one rank take turns.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from hvdlite.common.api.objects import allgather_object
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime.current import find
from hvdlite.common.runtime.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")
# Held by the thread of a rank whose call is at work. A call may be part of another one.
_turns: WeakKeyDictionary[Runtime, threading.RLock] = WeakKeyDictionary()


def in_turn(call: Callable[P, T]) -> Callable[P, T]:
    """Let one thread of a rank at a time make `call`, and others of this decorator."""

    @functools.wraps(call)
    def waits(*args: P.args, **options: P.kwargs) -> T:
        runtime = find()
        if runtime is None:
            return call(*args, **options)
        with _turns.setdefault(runtime, threading.RLock()):
            return call(*args, **options)

    return waits


def place() -> tuple[int, int]:
    """Return this rank and the number of ranks: 0 and 1 in a process without `init`."""
    runtime = find()
    return (0, 1) if runtime is None else (runtime.rank, runtime.topology.size)


def together(what: str, work: Callable[[], T]) -> list[T]:
    """Do `work` on all ranks, and return what it returned on each of them, in rank order.

    `what` is a call and its folder: "save of FOLDER". Where `work` raises an exception, that rank
    raises it, and all others `HorovodInternalError` with its text: no rank waits for one that has
    failed. The results must be small: they are pickled.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    if place()[1] == 1:
        if error is not None:
            raise error
        return [result]
    text = None if error is None else f"{type(error).__name__}: {error}"
    outcomes = allgather_object((what, text, result), "checkpoint")
    if error is not None:
        raise error
    for rank, (other, failure, _) in enumerate(outcomes):
        if _call(other) != _call(outcomes[0][0]):
            raise HorovodInternalError(
                f"ranks make different calls: rank 0 a {outcomes[0][0]}, rank {rank} a {other}",
                rank,
                job_goes_on=True,
            )
        if failure is not None:
            raise HorovodInternalError(
                f"{what}: rank {rank} failed: {failure}", rank, job_goes_on=True
            )
    results = [outcome for _, _, outcome in outcomes]
    results[place()[0]] = result  # Itself, not what a pickle has of it.
    return results


def _call(what: str) -> str:
    """Return what a step belongs to, without the folder, which hosts may call otherwise."""
    return what.partition(" of ")[0]


def check_same(what: str, facts: Mapping[str, str], digests: Sequence[bytes]) -> None:
    """Raise `HorovodInternalError` that names two ranks and a tensor, if digests of facts differ.

    `facts` says by the names of tensors what ranks must agree about.
    """
    if len(set(digests)) == 1:
        return
    of_ranks = allgather_object(dict(facts), "checkpoint.facts")
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        for name in [*first, *other]:
            here, there = first.get(name, "no such tensor"), other.get(name, "no such tensor")
            if here != there:
                raise HorovodInternalError(
                    f"{what}: ranks disagree on {name!r}: rank 0 has {here}, rank {rank} has "
                    f"{there}",
                    rank,
                    job_goes_on=True,
                )
