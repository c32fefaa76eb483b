"""The process group "hvdlite", as torch.distributed calls it."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from hvdlite.common.meeting.torch_store import offered
from hvdlite.common.runtime.current import current, find
from hvdlite.common.runtime.formed_sets import form_process_set, release_process_set
from hvdlite.common.runtime.lifecycle import init
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.torch.autograd import untraced
from hvdlite.torch.process_group.calls import Caller
from hvdlite.torch.process_group.checks import BACKEND, devices, is_available
from hvdlite.torch.process_group.copies import Copies
from hvdlite.torch.process_group.peers import Peers
from hvdlite.torch.process_group.reductions import Reductions
from hvdlite.torch.process_group.work import CollectiveWork


class HvdliteProcessGroup(Reductions, Copies, Peers, ProcessGroup):  # type: ignore[misc]
    """Some ranks of the job that communicate by the collectives of the engine.

    Every method that communicates returns a `CollectiveWork` at once. It raises `ValueError` for
    what this rank can see to be wrong, before anything is sent.
    """

    def __init__(self, caller: Caller, rank: int, store: Any) -> None:
        ProcessGroup.__init__(self, rank, len(caller.members))  # type: ignore[call-arg]
        Peers.__init__(self, caller, rank)
        self._store = store
        self._desc = ""
        # Older releases of torch forget a group without shutting it down.
        self._let_go = weakref.finalize(self, _let_go, caller)
        self._let_go.atexit = False

    def barrier(  # type: ignore[override]
        self, opts: Any = None, timeout: Any = None
    ) -> CollectiveWork:
        """Wait until all ranks of the group have called this."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        return self._work(self._caller.signal("barrier"), [], opts, timeout)

    # -- what torch asks

    def rank(self) -> int:
        """Return the number of this rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks of the group."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815 - the names of C++

    def getBackendName(self) -> str:  # noqa: N802 - the name of C++
        """Return "hvdlite"."""
        return BACKEND

    name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802 - the name of C++
        """Return the name that torch has given to the group."""
        return self._caller.torch_name

    group_name = property(getGroupName)

    def _set_group_name(self, name: str) -> None:
        self._caller.be_called(name)

    def getGroupDesc(self) -> str:  # noqa: N802 - the name of C++
        """Return what torch says that the group is for."""
        return self._desc

    group_desc = property(getGroupDesc)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        here = [kind for kind in devices() if kind == "cpu" or is_available(kind)]
        return [torch.device(kind) for kind in here]

    @property
    def supports_splitting(self) -> bool:
        """Whether `split_group` works: it does not, `new_group` does."""
        return False

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `wait` waits for later calls."""
        self._caller.timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Let go of the process set; torch calls it when the group is destroyed."""
        self._kept.clear()
        self._coalesced = None
        self._let_go()

    def abort(self) -> None:
        """Do as `shutdown` does; what waits for a collective of this group raises at once."""
        self._caller.abort.call()
        self.shutdown()


def _let_go(caller: Caller) -> None:
    """Let go of the set of a group; it goes with the last group that has it."""
    if find() is caller.runtime and caller.process_set is not global_process_set:
        release_process_set(caller.process_set)


# torch.compile calls these methods instead of tracing into them.
for _name in (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced",
    "_allgather_base", "allgather_into_tensor_coalesced",
    "all_to_all_single", "alltoall_base", "alltoall", "gather", "scatter",
    "barrier", "send", "recv",
):  # fmt: skip
    setattr(HvdliteProcessGroup, _name, untraced(getattr(HvdliteProcessGroup, _name)))


def create(options: Any, backend_options: Any = None) -> HvdliteProcessGroup:
    """Return a process group of the ranks that `options` of torch name; its members call this.

    Calls `init` where that has not been done; the ranks meet in the store of torch unless hvdlite's
    own launcher has started them. Raises `ValueError` for ranks that are not those of hvdlite, and
    for a group whose ranks do not ascend.
    """
    if find() is None and not options.global_ranks_in_group:
        with offered(options.store, options.group_rank, options.group_size):
            init()
    runtime = current()
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    if len(members) == options.group_size and members[options.group_rank] != runtime.rank:
        raise ValueError(
            f"torch.distributed says that this is rank {members[options.group_rank]}, and hvdlite "
            f"that it is rank {runtime.rank} of {runtime.topology.size}: let both have the numbers "
            "of one launcher, or call hvd.init_process_group(), which needs none"
        )
    if not options.global_ranks_in_group and len(members) != runtime.topology.size:
        raise ValueError(
            f"torch.distributed says world_size={len(members)}, and hvdlite has "
            f"{runtime.topology.size} ranks: leave world_size out"
        )
    if members != sorted(members):
        raise ValueError(
            f"new_group(ranks={members}): the ranks of a group of hvdlite ascend: give "
            f"{sorted(members)}"
        )
    if runtime.config.check_weights:
        from hvdlite.torch.process_group.weights import watch_optimizers  # Most never need it.

        watch_optimizers()
    if len(members) == runtime.topology.size:
        process_set = global_process_set
    else:  # Blocks until all members have called this, or raises `HorovodInternalError`.
        process_set = form_process_set(members, options.timeout.total_seconds())
    caller = Caller(runtime, process_set, members, options.timeout)
    return HvdliteProcessGroup(caller, options.group_rank, options.store)
