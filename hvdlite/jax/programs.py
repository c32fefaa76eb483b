"""Collectives as an operation of JAX, which can be traced, compiled, differentiated and batched.

One operation runs several collectives, of which each starts as soon as its inputs are computed.
The programs of a thread run their collectives in the order of the script: JAX hands a token from
each to the next one, also from program to program (order.py). What is called outside of programs
does not wait for them, and they do not wait for it; join, barrier and shutdown do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, effects
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.runtime.current import finder, use
from hvdlite.common.tensors.numpy_adapter import Array, aligned_empty
from hvdlite.jax.calls import Call, Kind
from hvdlite.jax.native.executions import register, served_library
from hvdlite.jax.native.library import START, TAKE
from hvdlite.jax.order import EFFECT, end_before_exit
from hvdlite.jax.python_calls import lower_call
from hvdlite.jax.starting import start_now

Arrays = Sequence[Any]
Back = Callable[[list[Any]], list[Any]]  # From the gradients of results to those of inputs.

exchange_p: Any = Primitive("hvdlite")
exchange_p.multiple_results = True


def is_tracing() -> bool:
    """Return whether JAX looks at what the script does, instead of computing it at once."""
    return not core.trace_state_clean()


def exchange(parts: Sequence[tuple[Call, Arrays]], back: Back | None = None) -> list[list[Any]]:
    """Return the results of each of some collectives, which run at the same time.

    `back` makes the gradients of all inputs from those of all results: the only derivative of what
    is not linear. A sum is, so that it can be differentiated forward, too.
    """
    calls = tuple(call for call, _ in parts)
    counts = tuple(len(inputs) for _, inputs in parts)
    arrays = [jnp.asarray(array) for _, inputs in parts for array in inputs]
    described = _kinds(arrays, calls, counts)
    for call, kinds in described:
        call.check(kinds)
    run: Callable[..., Any] = partial(exchange_p.bind, calls=calls, counts=counts, back=back)
    if back is not None and is_tracing() and not all(call.is_linear for call in calls):
        run = _with_gradient(run, back)
    results = run(*arrays)
    return _by_call(results, [len(call.results(inputs)) for call, inputs in described])


def _with_gradient(run: Callable[..., Any], back: Back) -> Callable[..., Any]:
    """Return the function with a gradient backward; JAX refuses to differentiate it forward."""

    @jax.custom_vjp
    def differentiable(*arrays: Any) -> list[Any]:
        return [*run(*arrays)]

    def backward(_: None, gradients: list[Any]) -> tuple[Any, ...]:
        made = back([*map(_with_values, gradients)])
        return tuple(
            None if is_of_integers(of_result) else each
            for each, of_result in zip(made, gradients, strict=True)
        )

    differentiable.defvjp(lambda *arrays: (differentiable(*arrays), None), backward)
    made: Callable[..., Any] = differentiable
    return made


def is_of_integers(gradient: Any) -> bool:
    """Return whether it is what JAX gives for integers (``allow_int``): it has no values."""
    return bool(getattr(gradient, "dtype", None) == jax.dtypes.float0)


def _with_values(tangent: Any) -> Any:
    """Return what can be sent: zeros for one of integers, beside which there may be others."""
    return jnp.zeros(tangent.shape, jnp.float32) if is_of_integers(tangent) else tangent


def _by_call(items: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    remaining = iter(items)
    return [[next(remaining) for _ in range(count)] for count in counts]


def _kind(array: Any) -> Kind:
    return Kind(tuple(array.shape), np.dtype(array.dtype))


def _kinds(
    arrays: Arrays, calls: Sequence[Call], counts: Sequence[int]
) -> list[tuple[Call, list[Kind]]]:
    return list(zip(calls, _by_call([*map(_kind, arrays)], counts), strict=True))


# -- what is computed at once


@exchange_p.def_impl
def _run(*arrays: Any, calls: Sequence[Call], counts: Sequence[int], back: Back | None) -> Arrays:
    return [jnp.asarray(result) for result in run_now([*map(np.asarray, arrays)], calls, counts)]


def run_now(arrays: Sequence[Array], calls: Sequence[Call], counts: Sequence[int]) -> list[Array]:
    """Start collectives on arrays, and wait for all of them. Raises as the engine does."""
    started, results = [], []
    for call, inputs in zip(calls, _by_call(arrays, counts), strict=True):
        kinds = call.results([*map(_kind, inputs)])
        places = [aligned_empty(kind.shape, kind.dtype) for kind in kinds]
        if call.keeps_shape:
            for place, value in zip(places, inputs, strict=True):
                place[...] = value
        read = places if call.keeps_shape else inputs
        started.append(start_now(call, read, places))
        results += places
    errors = [each.ended() for each in started]  # All of them: they read and write these arrays.
    error = next((each for each in errors if each is not None), None)
    if error is not None:
        raise error
    return results


# -- in programs


@exchange_p.def_effectful_abstract_eval
def _results(
    *arrays: Any, calls: Sequence[Call], counts: Sequence[int], back: Back | None
) -> tuple[list[Any], set[effects.Effect]]:
    kinds = [
        kind for call, inputs in _kinds(arrays, calls, counts) for kind in call.results(inputs)
    ]
    return [core.ShapedArray(kind.shape, kind.dtype) for kind in kinds], {EFFECT}


_TICKET = core.ShapedArray((), np.dtype(np.uint32))


def _lower(
    ctx: Any, *values: Any, calls: Sequence[Call], counts: Sequence[int], back: Back | None
) -> Arrays:
    end_before_exit()
    if served_library() is None:
        return _lower_to_python(ctx, values, calls, counts)
    kinds = _kinds(ctx.avals_in, calls, counts)
    token = ctx.tokens_in.get(EFFECT)
    groups = zip(kinds, _by_call(values, counts), _by_call(ctx.avals_in, counts), strict=True)
    start = jax.ffi.ffi_lowering(START, has_side_effect=True)
    tickets = []
    for (call, inputs), operands, avals in groups:
        results = call.results(inputs)
        number = register(_placed(ctx.module_context, call), inputs, results)
        sizes = [] if call.keeps_shape else [kind.nbytes for kind in results]
        around = ctx.replace(
            avals_in=[core.abstract_token, *avals], avals_out=[core.abstract_token, _TICKET]
        )
        token, ticket = start(
            around, token, *operands, call=np.int64(number), sizes=np.array(sizes, np.int64)
        )
        tickets.append(ticket)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({EFFECT: token})))
    take = jax.ffi.ffi_lowering(TAKE, has_side_effect=True)
    taken: Arrays = take(ctx.replace(avals_in=[_TICKET] * len(tickets)), *tickets)
    return taken


def _lower_to_python(
    ctx: Any, values: Arrays, calls: Sequence[Call], counts: Sequence[int]
) -> Arrays:
    """Make a program call Python, which runs the collectives and waits for them."""
    placed = tuple(_placed(ctx.module_context, call) for call in calls)
    runtime = finder()

    def run(*arrays: Any) -> tuple[Any, ...]:
        with use(runtime()):
            return tuple(run_now(arrays, placed, counts))

    return lower_call(ctx, run, values)


def _placed(module: Any, call: Call) -> Call:
    """Return a call with the user's name, or one that tells the place in what is compiled."""
    if call.name is not None or call.names:
        return call
    places = next((each for each in module.keepalives if type(each) is _Places), None)
    if places is None:
        places = _Places()
        module.add_keepalive(places)
    places.count += 1
    program = module.module.operation.attributes["sym_name"].value
    return call.placed(program, places.count)


class _Places:
    """How many collectives without a name a program has."""

    count = 0


def _refuse(ctx: Any, *values: Any, calls: Sequence[Call], **params: Any) -> Arrays:
    (platform, *_) = ctx.module_context.platforms
    raise NotImplementedError(
        f"{calls[0].collective}: programs for {platform} cannot have collectives: call it outside "
        "of jax.jit, or compile the program for CPUs"
    )


mlir.register_lowering(exchange_p, _refuse)
mlir.register_lowering(exchange_p, _lower, platform="cpu", cacheable=False)


# -- as automatic differentiation sees them


def _differentiate(
    arrays: Arrays, tangents: Arrays, *, calls: Sequence[Call], counts: Sequence[int],
    back: Back | None,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    params = {"counts": counts, "back": back}
    results = exchange_p.bind(*arrays, calls=calls, **params)
    if all(type(tangent) is ad.Zero for tangent in tangents):
        return results, [*map(_zero, results)]
    for call in calls:
        if not call.is_linear:
            raise ValueError(
                f"{call.collective}: it has no derivative forward, as it is no sum: take jax.grad "
                "or another form that goes backward"
            )
    there = [_with_values(ad.instantiate_zeros(tangent)) for tangent in tangents]
    derived = tuple(call.derived("tangent") for call in calls)
    found = exchange_p.bind(*there, calls=derived, **params)
    return results, [
        tangent if jnp.issubdtype(result.dtype, jnp.inexact) else _zero(result)
        for tangent, result in zip(found, results, strict=True)
    ]


def _zero(result: Any) -> Any:
    return ad.Zero(jax.typeof(result).to_tangent_aval())


ad.primitive_jvps[exchange_p] = _differentiate


def _transpose(
    gradients: Arrays, *arrays: Any, calls: Sequence[Call], counts: Sequence[int],
    back: Back | None,
) -> Arrays:  # fmt: skip
    assert back is not None
    made = back([ad.instantiate_zeros(gradient) for gradient in gradients])
    wanted = [ad.is_undefined_primal(array) for array in arrays]
    return [each if asked else None for each, asked in zip(made, wanted, strict=True)]


ad.primitive_transposes[exchange_p] = _transpose


# -- over a dimension that jax.vmap adds


def _batch(
    arrays: Arrays, dims: Sequence[Any], *, calls: Sequence[Call], counts: Sequence[int],
    back: Back | None,
) -> tuple[Arrays, Sequence[Any]]:  # fmt: skip
    moved: list[Any] = []
    dims_out: list[Any] = []
    for call, inputs, places in zip(
        calls, _by_call(arrays, counts), _by_call(dims, counts), strict=True
    ):
        adasum = call.options.reduce_op is ReduceOp.ADASUM and SPECS[call.collective].reduces
        if adasum or call.exchange is not None:
            raise ValueError(
                f"{call.collective}: jax.vmap would make one tensor of those of all elements, and "
                f"{'Adasum' if call.exchange is None else 'this compression'} treats a tensor as a "
                "whole: call it outside of jax.vmap"
            )
        to = 0 if SPECS[call.collective].scalars else 1  # Rows stay the first dimension.
        for array, place in zip(inputs, places, strict=True):
            batched = place is not None
            moved.append(jnp.moveaxis(array, place, to) if batched else array)
            dims_out.append(to if batched else None)
    results = exchange_p.bind(*moved, calls=calls, counts=counts, back=back)
    return results, dims_out


batching.primitive_batchers[exchange_p] = _batch
