"""Make "hvdlite" known to torch.distributed as a backend, and "hvdlite://" as a way to meet.

`import hvdlite.torch` calls `register`, so nothing but names is imported here; the rest follows
with the first process group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hvdlite.torch.process_group.checks import BACKEND, URL, devices


def register() -> None:
    """Register the backend and the rendezvous, unless this build of torch has no distributed."""
    if not dist.is_available():
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=devices())
        register_rendezvous_handler(BACKEND, _meet)  # type: ignore[no-untyped-call]
        _allow_monitored_barrier()


def _allow_monitored_barrier() -> None:
    """Let ``torch.distributed.monitored_barrier`` pass for groups of hvdlite.

    torch refuses it for all backends but gloo before it asks the group.
    """
    torchs = dist.monitored_barrier

    @functools.wraps(torchs)
    def monitored_barrier(
        group: Any = dist.group.WORLD, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        is_member = group is not dist.GroupMember.NON_GROUP_MEMBER and dist.is_initialized()
        if not is_member or dist.get_backend(group) != BACKEND:
            return torchs(group, timeout, wait_all_ranks)
        if isinstance(timeout, float):
            timeout = timedelta(seconds=timeout)
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(
                f"Expected timeout argument to be of type datetime.timedelta, got {timeout}"
            )
        ours: Any = dist.group.WORLD if group is None else group
        return ours.monitored_barrier(timeout, wait_all_ranks)

    for module in (dist, dist.distributed_c10d):
        vars(module)["monitored_barrier"] = monitored_barrier


def _create(options: Any, backend_options: Any = None) -> Any:
    """Return a process group; torch calls it on the members of each new group."""
    from hvdlite.torch.process_group.group import create

    return create(options, backend_options)


def _meet(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield a store, the rank and the number of ranks; torch calls it for ``hvdlite://``."""
    from hvdlite.torch.process_group.rendezvous import meet

    yield meet(url, timeout)
    raise RuntimeError(f"{URL} cannot meet again: destroy the process group and make a new one")


def init_process_group(timeout: timedelta | None = None) -> None:
    """Make the default process group of ``torch.distributed`` out of all ranks of the job.

    Calls `init` where that has not been done; every rank must call it. The same as
    ``torch.distributed.init_process_group("hvdlite", init_method="hvdlite://")``. `timeout` is how
    long a rank waits for any collective of the group, 30 minutes by default. Raises `ValueError`
    where there is a default group already, and as `init` does.
    """
    dist.init_process_group(BACKEND, init_method=URL, timeout=timeout)
