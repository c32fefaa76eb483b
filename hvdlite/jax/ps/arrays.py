"""Arrays of JAX as the parameter server has them: values, which programs do not have yet."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdlite.jax.programs import is_tracing
from hvdlite.ps.layouts.blocks import Array


def check_untraced(*values: Any) -> None:
    """Raise `ValueError` in a program that is being traced, and for arrays that are."""
    if is_tracing() or any(isinstance(value, jax.core.Tracer) for value in values):
        raise ValueError(
            "the parameter server needs values, and JAX is tracing (by jax.jit, jax.grad or "
            "another transformation): call it between programs, with what they return"
        )


def stay_on_cpus() -> None:
    """Let JAX compute on CPUs in this process: a server takes no memory of a GPU."""
    with suppress(RuntimeError):  # There may be no other device than the default.
        jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])


def array_of(tensor: Any) -> Array:
    """Return the values of an array, which may share its memory. Raises `ValueError` if traced."""
    check_untraced(tensor)
    return np.asarray(tensor)


def tensor_of(array: Array) -> jax.Array:
    """Return an array of JAX. Raises `ValueError` in a program that is being traced."""
    check_untraced()
    return jnp.asarray(array)
