"""Calls that are checked once, and remembered by their names, as most come again each step."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from hvdlite.common.api.call_checks import check_call, check_text, members_of, splits_of
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.tensor_entries import PreparedCall
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.requests.messages import NO_RANK, Request
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.tensors.adapter import Adapter, TensorSpec

T = TypeVar("T")
_MOST_REQUESTS = 10_000  # that are remembered


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
    if known is not None and _is_same(known, specs, options):
        remembered = cast("tuple[Request, ...]", known[2])
        if not remembered or remembered[0].collective == collective:
            return remembered
    for spec in specs:
        check_call(collective, name, spec, options, members)
    if len({spec.device for spec in specs}) > 1:
        raise HorovodInternalError(
            f"{collective} '{name}': the tensors of a group must be on same device, "
            f"these are on {sorted({spec.device for spec in specs})}",
            job_goes_on=True,
        )
    if options.names:  # The names that the tensors would have without a group.
        names = [f"{collective}.{each}" for each in options.names]
    else:
        names = [f"{name}_{index}of{len(specs)}" for index in range(1, len(specs) + 1)]
    requests = tuple(
        _request(runtime, collective, each, spec, options, name, len(specs))
        for each, spec in zip(names, specs, strict=True)
    )
    remember(runtime, name, (specs, options, requests))
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
    if known is not None and _is_same(known, spec, options):
        remembered = cast("PreparedCall", known)
        if remembered.request.collective == collective:
            return remembered
    check_call(collective, name, spec, options, members)
    request = _request(runtime, collective, name, spec, options, "", 1)
    call = PreparedCall.of(spec, options, request)
    remember(runtime, name, call)
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
    check_call(collective, name, spec, options, members)
    splits: tuple[int, ...] = ()
    if SPECS[collective].splits:
        splits = splits_of(adapter, name, spec, options, len(members))
    request = _request(runtime, collective, name, spec, options, "", 1)
    return PreparedCall.of(spec, options, request), splits


def _is_same(known: Any, what: object, options: CallOptions) -> bool:
    """Return whether a call that is remembered is for such tensors, with such options.

    A root that is a float equals a rank, and is to be refused by `check_call`.
    """
    same: bool = known[0] == what and known[1] == options
    return same and isinstance(options.root_rank, int)


def remember(runtime: Runtime, name: str, call: Any) -> None:
    """Keep the call of a name for its next one."""
    if len(runtime.requests) >= _MOST_REQUESTS:
        runtime.forget_calls()
    runtime.requests[name] = call


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
    process_set_id = options.process_set.process_set_id or 0
    choice = runtime.choices.get(process_set_id)
    limit = None if choice is None else choice.limit_bytes(collective)
    return Request(
        process_set_id=process_set_id,
        name=name,
        collective=collective,
        dtype=spec.dtype,
        shape=spec.shape,
        device=spec.device,
        reduce_op=int(options.reduce_op) if collective_spec.reduces else 0,
        root_rank=int(options.root_rank) if collective_spec.rooted else NO_RANK,
        prescale_factor=float(options.prescale_factor),
        postscale_factor=float(options.postscale_factor),
        group=group,
        group_size=size if group else 0,
        settings=options.settings,
        fusion_bytes=options.fusion_bytes if limit is None else limit,
    )
