"""The options of a collective call, validated as far as possible without tensors or other ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from hvdlite.common.base.errors import UnsupportedError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.warn import warn_user
from hvdlite.common.requests.messages import JOB_THRESHOLD, NO_RANK
from hvdlite.common.runtime.process_sets import ProcessSet


class CallOptions(NamedTuple):
    """The arguments of one collective besides its tensors and its name."""

    process_set: ProcessSet
    reduce_op: ReduceOp = ReduceOp.AVERAGE
    root_rank: int = NO_RANK
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    splits: Any = None
    grouped: bool = False  # tensors are answered together, also when there is only one
    names: tuple[str, ...] = ()  # of the tensors of a group, where they have names of their own
    settings: str = ""  # what all ranks must have set alike
    # Whether the name is that of a place, where another rank may have another collective.
    by_place: bool = False
    fusion_bytes: int = JOB_THRESHOLD  # see `Request.fusion_bytes`


def resolve_op(average: bool | None, op: int | None) -> ReduceOp:
    """Return the reduce op of the deprecated `average` and of `op`; Average without both.

    Raises `ValueError` when both are given, or `op` is no reduction.
    """
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average; give only op")
        try:
            return ReduceOp(op)
        except ValueError:
            raise ValueError(
                f"op={op!r} is none of Average, Sum, Adasum, Min, Max, Product"
            ) from None
    if average is None:
        return ReduceOp.AVERAGE
    warn_user("average= is deprecated; use op=Average or op=Sum", DeprecationWarning)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def reduction(
    average: bool | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    grouped: bool = False,
) -> CallOptions:
    """Return the options of an allreduce. Raises `ValueError` as `resolve_op` does."""
    prescale_factor, postscale_factor = _factor(prescale_factor), _factor(postscale_factor)
    if average is None:
        try:
            return _known(op, prescale_factor, postscale_factor, process_set, grouped)
        except TypeError:  # Something cannot be hashed: it may be wrong, or an array.
            pass
    return _reduction(
        resolve_op(average, op), prescale_factor, postscale_factor, process_set, grouped
    )


def _factor(given: Any) -> Any:
    """Return a scale factor by its present value, which that of an array may not keep."""
    return given if isinstance(given, (float, str)) else float(given)


@lru_cache(64)
def _known(
    op: int | None, prescale: float, postscale: float, process_set: ProcessSet, grouped: bool
) -> CallOptions:
    """Return the options of calls that come again and again; the same object each time."""
    return _reduction(resolve_op(None, op), prescale, postscale, process_set, grouped)


def _reduction(
    reduce_op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet, grouped: bool
) -> CallOptions:
    return CallOptions(
        process_set,
        reduce_op,
        prescale_factor=prescale,
        postscale_factor=postscale,
        grouped=grouped,
    )


def scattering(
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    grouped: bool = False,
) -> CallOptions:
    """Return the options of a reducescatter. Raises `UnsupportedError` for Adasum."""
    options = reduction(None, op, prescale_factor, postscale_factor, process_set, grouped)
    _refuse_adasum("reducescatter", options)
    return options


def reducing(
    op: int,
    root_rank: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> CallOptions:
    """Return the options of a reduction to one rank. Raises `UnsupportedError` for Adasum."""
    options = reduction(None, op, prescale_factor, postscale_factor, process_set)
    _refuse_adasum("reduce", options)
    return options._replace(root_rank=root_rank)


def _refuse_adasum(collective: str, options: CallOptions) -> None:
    if options.reduce_op is ReduceOp.ADASUM:
        raise UnsupportedError(f"{collective} has no Adasum: use Average, Sum, Min, Max or Product")
