"""Rank and size as operations, which are answered when a graph is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.common.runtime.basics import local_rank, local_size, rank
from hvdlite.common.runtime.current import finder, use
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.tf.calls.python_graph_ops import in_any_order
from hvdlite.tf.errors import WithoutOwnFrames, public


@public
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return the number of this rank, as an int32 scalar."""
    return answer(rank, name or "HorovodRank")


@public
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return the number of this rank on its host, as an int32 scalar."""
    return answer(local_rank, name or "HorovodLocalRank")


@public
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host, as an int32 scalar."""
    return answer(local_size, name or "HorovodLocalSize")


@public
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks in a process set, as an int32 scalar.

    Raises `tf.errors.InvalidArgumentError`, when it is run, for a set that is not registered.
    """
    find = finder()
    return answer(lambda: len(_members(find(), process_set_id)), name or "HorovodSize")


@public
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this rank is a member of a process set, otherwise 0, as an int32 scalar.

    Raises `tf.errors.InvalidArgumentError`, when it is run, for a set that is not registered.
    """
    find = finder()

    def included() -> int:
        return int(find().rank in _members(find(), process_set_id))

    return answer(included, name or "HorovodProcessSetIncluded")


def _members(runtime: Runtime, process_set_id: int) -> tuple[int, ...]:
    members = runtime.engine.process_sets.find(process_set_id)
    if members is None:
        raise ValueError(f"there is no process set with the id {process_set_id}")
    return members


def answer(question: Callable[[], int], name: str) -> tf.Tensor:
    """Return what the question answers, in a graph whenever it is run, as an int32 scalar."""
    find = finder()

    def ask() -> Any:
        with use(find()):
            return np.int32(question())

    if tf.executing_eagerly():
        return tf.constant(ask())
    with in_any_order(), WithoutOwnFrames():
        answer = tf.numpy_function(ask, [], tf.int32, name=name)
    answer.set_shape([])
    return answer
