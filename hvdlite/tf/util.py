"""Small helpers that Horovod has under this name."""

from __future__ import annotations

from typing import Any

from hvdlite.common.api.horovod_util import (
    check_extension,
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
    split_list,
)
from hvdlite.tf import mpi_ops

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(mpi_ops)
check_num_rank_power_of_2 = num_rank_is_power_2


def vars_to_refs(vars: Any) -> Any:
    """Return hashable references to the variables: a tuple, nested as the lists are."""
    return tuple(map(vars_to_refs, vars)) if isinstance(vars, list) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variables of the references that `vars_to_refs` made."""
    return list(map(refs_to_vars, refs)) if isinstance(refs, tuple) else refs.deref()


__all__ = [
    "check_extension",
    "check_num_rank_power_of_2",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "refs_to_vars",
    "split_list",
    "vars_to_refs",
]
