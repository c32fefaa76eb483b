"""Functions of Python that a program calls, in the order of its collectives.

They are called with arrays of numpy, and not, as those of `jax.experimental.io_callback`, with
arrays that JAX may need the thread of the program for. After one that has raised an exception, the
next program runs all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import core, effects
from jax.extend.core import Primitive
from jax.interpreters import mlir

from hvdlite.jax.calls import Kind
from hvdlite.jax.order import EFFECT, end_before_exit

Arrays = Sequence[Any]

python_p: Any = Primitive("hvdlite_python")
python_p.multiple_results = True


def call_python(function: Callable[..., Arrays], results: Sequence[Kind], *arrays: Any) -> Any:
    """Let a program that is being traced call a function with arrays each time that it runs.

    It returns arrays of the kinds that `results` has. An error of it is a
    `jax.errors.JaxRuntimeError` where the results of the program are used.
    """
    return python_p.bind(*arrays, function=function, results=tuple(results))


@python_p.def_effectful_abstract_eval
def _results(
    *arrays: Any, function: Callable[..., Arrays], results: Sequence[Kind]
) -> tuple[list[Any], set[effects.Effect]]:
    return [core.ShapedArray(kind.shape, kind.dtype) for kind in results], {EFFECT}


def _lower(
    ctx: Any, *values: Any, function: Callable[..., Arrays], results: Sequence[Kind]
) -> Arrays:
    end_before_exit()
    return lower_call(ctx, lambda *arrays: tuple(function(*arrays)), values)


def lower_call(ctx: Any, function: Callable[..., tuple[Any, ...]], values: Arrays) -> Arrays:
    """Compile a call of a function, which comes after the collectives before it in the script."""
    token = ctx.tokens_in.get(EFFECT)
    results, token, _ = mlir.emit_python_callback(
        ctx, function, token, list(values), ctx.avals_in, ctx.avals_out, has_side_effect=True,
        returns_token=True,
    )  # fmt: skip
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({EFFECT: token})))
    found: Arrays = results
    return found


def _refuse(ctx: Any, *values: Any, **params: Any) -> Arrays:
    (platform, *_) = ctx.module_context.platforms
    raise NotImplementedError(
        f"programs for {platform} cannot call Python in the order of collectives: run it outside "
        "of jax.jit, or compile the program for CPUs"
    )


mlir.register_lowering(python_p, _refuse)
mlir.register_lowering(python_p, _lower, platform="cpu")
