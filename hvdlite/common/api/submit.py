"""A collective from the call to its result, for the tensors of any framework.

`submit` checks what one rank can check alone, and enqueues; nothing is sent for a call that fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.targets import check_target, check_targets
from hvdlite.common.api.tensor_entries import PreparedCall, TensorEntry, entry_of
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import BITWISE, ReduceOp
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.plain.adapter import COMPLEX, DTYPES, EXACT, FLOATS, Adapter, TensorSpec
from hvdlite.common.plain.messages import NO_RANK, Request
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.runtime import Runtime

T = TypeVar("T")

_MOST_REQUESTS = 10_000  # that are remembered


def as_list(operation: Operation[T], results: list[T]) -> Any:
    """Return the results as they are."""
    return results


@dataclass(slots=True)
class Operation(Generic[T]):
    """The operation behind a user's handle: one tensor, or a group."""

    entries: Sequence[TensorEntry[T]]
    shape_result: Callable[[Operation[T], list[T]], Any] = as_list

    def poll(self) -> bool:
        """Return whether all entries have ended, also on their device."""
        return all(entry.handle.is_computed() for entry in self.entries)

    def wait(self) -> Any:
        """Sleep until all entries have ended; return the result, or raise the first error."""
        if len(self.entries) == 1:
            return self.shape_result(self, [self.entries[0].wait_for_result()])
        return self.shape_result(self, self.wait_for_tensors())

    def wait_for_tensors(self) -> list[T]:
        """Sleep until all entries have ended; return the tensors, or raise the first error."""
        results: list[T] = []
        error: HorovodInternalError | None = None
        for entry in self.entries:
            try:
                results.append(entry.wait_for_result())
            except HorovodInternalError as failure:
                error = error or failure
        if error is not None:
            raise error
        return results


def start(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    name: str | None,
    tensors: Sequence[T],
    options: CallOptions,
    targets: Sequence[T] | None = None,
    *,
    waits: bool = False,
) -> list[TensorEntry[T]]:
    """Enqueue as `submit`, under the user's `name`, or the next number of the process set."""
    label = f"grouped_{collective}" if options.grouped else collective
    if name is None:
        with runtime.named(name, options.process_set) as known:
            label = f"{label}.{known}"
            return submit(
                runtime, adapter, collective, label, tensors, options, targets, waits=waits
            )
    label = f"{label}.{name}"
    return submit(runtime, adapter, collective, label, tensors, options, targets, waits=waits)


def submit(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    name: str,
    tensors: Sequence[T],
    options: CallOptions,
    targets: Sequence[T] | None = None,
    *,
    waits: bool = False,
) -> list[TensorEntry[T]]:
    """Enqueue one collective on one tensor or on a group; never waits.

    `targets` are the tensors to write to (in place: the inputs). `waits`: see `Engine.enqueue`.
    Raises `ValueError` for what this rank can see to be wrong, `HorovodInternalError` when the
    engine has ended.
    """
    if not options.grouped:
        target = None if targets is None else targets[0]
        make = _entry_with_splits if SPECS[collective].splits else _entry
        entries = [make(runtime, adapter, collective, name, tensors[0], options, target)]
        runtime.engine.enqueue(entries, waits=waits)
        return entries
    specs = tuple(adapter.spec(tensor) for tensor in tensors)
    remembered = runtime.requests.get(name)
    requests = prepared_group(runtime, collective, name, specs, options)
    for spec, tensor, target in zip(specs, tensors, targets or (), strict=False):
        _check_target(runtime, adapter, collective, name, spec, tensor, target, options)
    entries = [
        TensorEntry(request, adapter, tensor, None if targets is None else targets[index])
        for index, (request, tensor) in enumerate(zip(requests, tensors, strict=True))
    ]
    if targets is not None:
        is_new = runtime.requests.get(name) is not remembered
        if is_new or len(set(map(id, targets))) < len(targets):
            runtime.requests.pop(name, None)  # the next call is checked again if this one fails
            check_targets(entries)
            _remember(runtime, name, (specs, options, requests))
    runtime.engine.enqueue(entries)
    return entries


def submit_each(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    names: Sequence[str],
    tensors: Sequence[T],
    options: CallOptions,
) -> list[TensorEntry[T]]:
    """Enqueue one collective on each tensor, under its name, in one call; see `submit`."""
    entries = [
        _entry(runtime, adapter, collective, f"{collective}.{name}", tensor, options, None)
        for name, tensor in zip(names, tensors, strict=True)
    ]
    runtime.engine.enqueue(entries)
    return entries


def _entry(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    name: str,
    tensor: T,
    options: CallOptions,
    target: T | None,
) -> TensorEntry[T]:
    """Return the entry of one tensor. Raises `ValueError`."""
    call = prepared(runtime, adapter, collective, name, tensor, options)
    _check_target(runtime, adapter, collective, name, call.spec, tensor, target, options)
    return entry_of(call, adapter, tensor, target)


def _entry_with_splits(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    name: str,
    tensor: T,
    options: CallOptions,
    target: T | None,
) -> TensorEntry[T]:
    """Return the entry of one tensor, whose splits may be others in each call, as `_entry`."""
    same = options if options.splits is None else options._replace(splits=None)
    call = prepared(runtime, adapter, collective, name, tensor, same)
    members = members_of(runtime, collective, options.process_set)
    splits = _splits(adapter, name, call.spec, options, len(members))
    _check_target(runtime, adapter, collective, name, call.spec, tensor, target, options)
    return TensorEntry(call.request, adapter, tensor, target, splits)


def _check_target(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    name: str,
    spec: TensorSpec,
    tensor: T,
    target: T | None,
    options: CallOptions,
) -> None:
    """Raise `ValueError` for a target that is no place for the result, as `check_target`."""
    if target is not None and target is not tensor:
        members = members_of(runtime, collective, options.process_set)
        place = len(members), members.index(runtime.rank)
        check_target(collective, name, spec, adapter.spec(target), *place)


def prepared_group(
    runtime: Runtime,
    collective: str,
    name: str,
    specs: tuple[TensorSpec, ...],
    options: CallOptions,
) -> tuple[Request, ...]:
    """Return the requests for the tensors of a group, which are checked once, as `prepared`."""
    members = members_of(runtime, collective, options.process_set)
    known = runtime.requests.get(name)
    if known is not None and known[0] == specs and known[1] == options:
        return cast("tuple[Request, ...]", known[2])
    for spec in specs:
        _check(collective, name, spec, options, members)
    if len({spec.device for spec in specs}) > 1:
        raise HorovodInternalError(
            f"{collective} '{name}': the tensors of a group must be on same device, "
            f"these are on {sorted({spec.device for spec in specs})}",
            job_goes_on=True,
        )
    requests = tuple(
        _request(runtime, collective, each, spec, options, name, len(specs))
        for each, spec in zip(_names(collective, name, len(specs), options), specs, strict=True)
    )
    _remember(runtime, name, (specs, options, requests))
    return requests


def prepared(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    name: str,
    tensor: T,
    options: CallOptions,
) -> PreparedCall:
    """Return the call for one tensor. It is checked once, as most names come again each step."""
    members = members_of(runtime, collective, options.process_set)
    spec = adapter.spec(tensor)
    known = runtime.requests.get(name)
    if known is not None and known[0] == spec and known[1] == options:
        return cast("PreparedCall", known)
    _check(collective, name, spec, options, members)
    request = _request(runtime, collective, name, spec, options, "", 1)
    call = PreparedCall.of(spec, options, request)
    _remember(runtime, name, call)
    return call


def prepared_once(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    name: str,
    tensor: T,
    options: CallOptions,
) -> tuple[PreparedCall, tuple[int, ...]]:
    """Return the call for one tensor, and its splits, under a name that never comes again.

    It is checked as `prepared` does and not remembered, so that it displaces no other name.
    """
    members = members_of(runtime, collective, options.process_set)
    spec = adapter.spec(tensor)
    _check(collective, name, spec, options, members)
    splits: tuple[int, ...] = ()
    if SPECS[collective].splits:
        splits = _splits(adapter, name, spec, options, len(members))
    request = _request(runtime, collective, name, spec, options, "", 1)
    return PreparedCall.of(spec, options, request), splits


def _remember(runtime: Runtime, name: str, call: Any) -> None:
    if len(runtime.requests) >= _MOST_REQUESTS:
        runtime.forget_calls()
    runtime.requests[name] = call


def members_of(runtime: Runtime, what: str, process_set: ProcessSet) -> tuple[int, ...]:
    """Return the global ranks of a set that this rank belongs to. Raises `ValueError` otherwise."""
    members = registered(runtime, what, process_set)
    if runtime.rank not in members:
        raise ValueError(
            f"{what}: Rank {runtime.rank} is not a member of the provided process set {process_set}"
        )
    return members


def registered(runtime: Runtime, what: str, process_set: ProcessSet) -> tuple[int, ...]:
    """Return the global ranks of a set. Raises `ValueError` for one that does not exist."""
    process_set_id = process_set.process_set_id
    members = None
    if process_set_id is not None:
        members = runtime.engine.process_sets.find(process_set_id)
    if members is None:
        raise ValueError(
            f"{what}: Process set provided does not exist or is not registered: {process_set}"
        )
    return members


def _request(
    runtime: Runtime,
    collective: str,
    name: str,
    spec: TensorSpec,
    options: CallOptions,
    group: str,
    size: int,
) -> Request:
    collective_spec = SPECS[collective]
    check_text(collective, name)
    check_text(collective, group)
    return Request(
        process_set_id=options.process_set.process_set_id or 0,
        name=name,
        collective=collective,
        dtype=spec.dtype,
        shape=spec.shape,
        device=spec.device,
        reduce_op=int(options.reduce_op) if collective_spec.reduces else 0,
        root_rank=options.root_rank if collective_spec.rooted else NO_RANK,
        prescale_factor=float(options.prescale_factor),
        postscale_factor=float(options.postscale_factor),
        group=group,
        group_size=size if group else 0,
        settings=options.settings,
        fusion_bytes=_fusion_bytes(runtime, collective, options),
    )


def check_text(collective: str, name: str) -> None:
    """Raise `ValueError` for a name that no message can carry."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{collective} {name!a}: the name cannot be sent to other ranks, as "
            f"{name[error.start]!a} at position {error.start} is half a character (a surrogate, "
            "as from a file name that is not UTF-8): give another name"
        ) from None


def _fusion_bytes(runtime: Runtime, collective: str, options: CallOptions) -> int:
    """Return the option, or the choice for this collective and process set."""
    choice = runtime.choices.get(options.process_set.process_set_id or 0)
    limit = None if choice is None else choice.limit_bytes(collective)
    return options.fusion_bytes if limit is None else limit


def _names(collective: str, name: str, count: int, options: CallOptions) -> list[str]:
    if options.names:  # The names that the tensors would have without a group.
        return [f"{collective}.{each}" for each in options.names]
    return [f"{name}_{index}of{count}" for index in range(1, count + 1)]


def _check(
    collective: str, name: str, spec: TensorSpec, options: CallOptions, members: tuple[int, ...]
) -> None:
    """Raise `ValueError` for what no other rank could make right."""
    collective_spec = SPECS[collective]
    if spec.dtype not in DTYPES:
        raise ValueError(
            f"{collective} '{name}': Tensor type {spec.dtype} is not supported; "
            f"these are: {', '.join(sorted(DTYPES))}"
        )
    if collective_spec.reduces:
        _check_reduction(f"{collective} '{name}'", spec.dtype, options.reduce_op)
        for factor in (options.prescale_factor, options.postscale_factor):
            if isinstance(factor, str) or math.isnan(factor):
                raise ValueError(f"{collective} '{name}': {factor!r} is no scale factor")
            if options.reduce_op in BITWISE and factor != 1:
                raise ValueError(
                    f"{collective} '{name}': {options.reduce_op.name} is not scaled: give no "
                    f"factor, not {factor}"
                )
        if not collective_spec.scalars and not spec.shape:
            raise ValueError(f"{collective} '{name}' does not support scalar inputs")
    if collective_spec.rooted and options.root_rank not in members:
        raise ValueError(
            f"{collective} '{name}': invalid root rank {options.root_rank}: "
            f"the process set has the global ranks {list(members)}"
        )


def _check_reduction(what: str, dtype: str, reduce_op: ReduceOp) -> None:
    if reduce_op in (ReduceOp.MIN, ReduceOp.MAX) and dtype in COMPLEX:
        raise ValueError(
            f"{what}: {reduce_op.name.capitalize()} of {dtype} has no meaning: complex numbers "
            "have no order. Reduce the real and imaginary parts, or the absolute values"
        )
    if reduce_op is ReduceOp.AVERAGE and dtype == "bool":
        raise ValueError(
            f"{what}: the Average of bool has no meaning. Use op=Sum or Max for 'on any rank', "
            "Product or Min for 'on all ranks', or convert to a number type"
        )
    if reduce_op in BITWISE and dtype not in EXACT:
        raise ValueError(
            f"{what}: {reduce_op.name} of {dtype} has no meaning: bits are combined of integers "
            "and bool. View the tensor as integers of the same size"
        )
    if reduce_op is ReduceOp.ADASUM and dtype not in FLOATS:
        raise ValueError(f"{what}: Adasum needs a floating-point tensor, this is {dtype}")


def _splits(
    adapter: Adapter[T], name: str, spec: TensorSpec, options: CallOptions, members: int
) -> tuple[int, ...]:
    """Rows of an alltoall for each member. Raises `ValueError`."""
    what = f"alltoall '{name}'"
    rows = spec.shape[0] if spec.shape else 0
    if options.splits is None:
        if spec.shape and rows % members:
            raise ValueError(
                f"{what}: without splits the first dimension must be divisible by the number of "
                f"ranks; {rows} rows for {members} ranks"
            )
        return (rows // members,) * members
    try:
        splits = adapter.read_splits(options.splits)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if len(splits) != members:
        raise ValueError(f"{what}: {len(splits)} splits for {members} ranks")
    if any(split < 0 for split in splits):
        raise ValueError(f"{what}: splits must not be negative: {splits}")
    if sum(splits) > rows:
        raise ValueError(f"{what}: the splits {splits} sum to {sum(splits)}, beyond {rows} rows")
    return tuple(splits)
