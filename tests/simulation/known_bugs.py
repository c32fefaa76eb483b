"""Mistakes that were mended once, each put back by undoing its mend in one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.connections import dial, prove
from hvdlite.common.connections.prove import CLAIM, NONCE_BYTES
from hvdlite.common.decisions.aggregator import Aggregator
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.elastic.state import ObjectState
from hvdlite.common.engine.control_plane import ControlPlane
from hvdlite.common.engine.engine import Engine
from hvdlite.common.engine.response_memory import ResponseMemory
from hvdlite.common.meeting.client import ServerExchange
from hvdlite.launcher.agent_process.agent import Agent
from hvdlite.launcher.agent_process.relay import WorkerRelay
from hvdlite.launcher.agents.host_agents import HostAgents
from hvdlite.launcher.decisions import hosts
from hvdlite.launcher.decisions.hosts import Hosts, order_hosts
from hvdlite.launcher.decisions.placement import Placement
from hvdlite.launcher.decisions.workers import Worker
from hvdlite.launcher.decisions.world_changes import WorldChanges
from hvdlite.ps.connections.connection import Connection
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.scheduler.changes import Changes
from hvdlite.ps.server.checkpoints import ServerCheckpoints
from hvdlite.ps.server.migration import Migration
from hvdlite.ps.server.server import Server
from hvdlite.ps.tables.clocks import Clocks
from hvdlite.ps.tables.row_table import RowTable
from hvdlite.ps.worker.shard import Shard
from tests.simulation.ps import disks
from tests.simulation.ranks.transport import Network

KNOWN_BUGS: dict[str, Callable[[], Any]] = {}


def bug(
    owner: Any, method: str, bugs: dict[str, Callable[[], Any]] = KNOWN_BUGS
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let the decorated function take the place of a method, which it is given first."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        real = getattr(owner, method)

        def put_back(self: Any, *arguments: Any, **options: Any) -> Any:
            return function(real, self, *arguments, **options)

        name = function.__name__.replace("_", " ")
        bugs[name] = lambda: patch.object(owner, method, put_back)
        return function

    return decorate


@bug(Coordinator, "_join")
def a_join_overtakes_what_its_rank_reports_again(
    real: Any, self: Coordinator, state: Any, ranks: int, request: Any, now: float
) -> None:
    """The counts in the join, which tell that it has crossed an eviction, are not compared."""
    real(self, state, ranks, request._replace(shape=(state.joins, state.evictions)), now)


@bug(Coordinator, "_evict")
def a_joined_rank_stays_excused_from_what_is_evicted(
    real: Any, self: Coordinator, state: Any, bit: int
) -> None:
    state.bits.discard(bit)
    real(self, state, bit)


@bug(ResponseMemory, "evict")
def a_join_that_crossed_an_eviction_is_not_repeated(
    real: Any, self: ResponseMemory, eviction: Any
) -> Any:
    state = self._set(eviction.process_set_id)
    join, state.join = state.join, None
    try:
        return real(self, eviction)
    finally:
        state.join = join


@bug(Aggregator, "_receive_request")
def a_join_overtakes_what_a_leader_holds(
    real: Any, self: Aggregator, state: Any, process_set_id: int, ranks: int, request: Any, now: Any
) -> None:
    if SPECS[request.collective].effect is Effect.JOIN:
        self._pass(state, process_set_id, {request: ranks})
    else:
        real(self, state, process_set_id, ranks, request, now)


@bug(Coordinator, "_fail_all")
def a_departure_with_a_join_outstanding(real: Any, self: Coordinator, state: Any) -> None:
    """The ranks that have joined are not told that a member has left."""
    join, state.join = state.join, None
    real(self, state)
    state.join = join


@bug(Engine, "_drop_set")
def what_waits_in_a_removed_set_is_forgotten(real: Any, self: Engine, process_set_id: int) -> None:
    self._memory.forget_set(process_set_id)
    self._inbox.remove(self._pending.pop_set(process_set_id))


@bug(Coordinator, "_forget_sets")
def a_cancelled_set_leaves_its_evictions_to_the_next_one(
    real: Any, self: Coordinator, gone: Any
) -> None:
    """The id of a set that was removed is given to another one."""
    for process_set_id in gone:
        del self._sets[process_set_id]
    self._cut.clear()


@bug(ControlPlane, "blame")
def who_loses_a_connection_names_its_other_end(
    real: Any, self: ControlPlane, lost: Any
) -> HorovodInternalError:
    """Although that rank has only heard sooner of the one that is to blame."""
    return HorovodInternalError(str(lost), rank=lost.rank)


@bug(Engine, "_negotiate_meanwhile")
def a_rank_that_waits_for_data_hears_nothing(real: Any, self: Engine) -> None:
    pass


# By the transport, which has a limit for that.
KNOWN_BUGS["a peer that says nothing more is waited for"] = lambda: patch.object(
    Network, "_lose_in_time", lambda self, rank, peer: None
)


# Of the meeting of ranks, and their proofs.
def _believe() -> Any:
    return patch.object(
        prove, "check_claim", lambda secret, challenge, data: prove.Claim.unpack(data[: CLAIM.size])
    )


def _without_nonces() -> Any:
    return patch.object(prove, "new_nonce", lambda: bytes(NONCE_BYTES))


KNOWN_BUGS["a claim is believed without its proof"] = _believe
KNOWN_BUGS["a claim holds for another connection"] = _without_nonces
KNOWN_BUGS["a connection that is reset while it is proved is not tried again"] = lambda: (
    patch.object(dial, "RESETS", ())
)
KNOWN_BUGS["a rank does not look for the meeting again"] = lambda: patch.object(
    ServerExchange, "allgather", ServerExchange._allgather
)

ELASTIC_BUGS: dict[str, Callable[[], Any]] = {}
PS_BUGS: dict[str, Callable[[], Any]] = {}
ELASTIC_BUGS["a worker is believed without its proof"] = _believe
PS_BUGS["a member is believed without its proof"] = _believe
PS_BUGS["a proof of a member holds for another connection"] = _without_nonces
KNOWN_BUGS["a leader ends before those below it"] = lambda: patch.object(
    ControlPlane,
    "finished",
    property(lambda self: not self.orders and self._rank in self._departed),
)
# The job ends when all its hosts are replaced, although others are on their way.
ELASTIC_BUGS["the last host that leaves"] = lambda: patch.object(
    Placement, "_last_holders", lambda self, staying, now: []
)
ELASTIC_BUGS["a worker starts where another one has not ended"] = lambda: patch.object(
    Worker, "ending", property(lambda self: False)
)
ELASTIC_BUGS["a newcomer is rank 0 while an older rank lives"] = lambda: patch.object(
    Placement,
    "hosts_in_order",
    lambda self, now: order_hosts(
        self._assigned,
        dict.fromkeys([*self._hosts.usable(now), *(w.host for w in self.last_holders(now))]),
    ),
)


# Two hosts do not reach each other: nobody has died, and all ranks wait for a loss that is told.
ELASTIC_BUGS["the link that is cut"] = lambda: patch.object(
    WorldChanges, "regroup_if_broken", lambda self, now: None
)


def _without_a_limit(
    _self: Placement, _staying: list[Worker], gone: list[Worker], last_holders: Sequence[Worker]
) -> list[Worker]:
    return [each for each in gone if each not in last_holders]


ELASTIC_BUGS["hosts that come back make more ranks than the job may have"] = lambda: patch.object(
    Placement, "_unwanted", _without_a_limit
)
ELASTIC_BUGS["a rank that has to leave takes the last commit with it"] = lambda: patch.object(
    Placement, "_with_last_commit", lambda self, chosen, now: chosen
)


@bug(Clocks, "push", PS_BUGS)
def a_push_that_is_sent_again_counts_again(
    real: Any, self: Clocks, worker: int, clock: int
) -> bool:
    self.finished[worker] = min(clock, self.finished[worker])
    return bool(real(self, worker, clock))


@bug(Shard, "come_again", PS_BUGS)
def what_a_lost_server_was_asked_is_not_asked_of_its_successor(real: Any, self: Shard) -> None:
    self._push = None
    real(self)


@bug(Connection, "send_again", PS_BUGS)
def what_was_under_way_on_a_link_that_is_cut_is_lost(real: Any, self: Connection) -> None:
    self.forget()


@bug(Changes, "look", PS_BUGS)
def the_restart_of_the_scheduler_amid_scaling(
    real: Any, self: Changes, now: float, **options: Any
) -> None:
    """A layout counts before a scheduler that comes again knows of it."""
    with patch.object(self, "_keep", lambda: True):
        real(self, now, **options)


@bug(ServerCheckpoints, "look", PS_BUGS)
def a_load_is_made_by_who_leads_it_alone(real: Any, self: ServerCheckpoints, news: Any) -> None:
    """Who is lost between two servers leaves one of them with what it had."""


@bug(Clocks, "stand", PS_BUGS)
def a_load_leaves_workers_at_their_steps(real: Any, self: Clocks, *words: Any) -> None:
    """A step that one server alone had before the load is missing there for good."""


@bug(Server, "save_next", PS_BUGS)
def the_restart_of_a_server_amid_scaling(real: Any, self: Server, saved: Any) -> None:
    """It is ready for the next layout before its tables of that are on disk."""


@bug(Migration, "_at_border", PS_BUGS)
def a_table_is_sent_before_all_pushes_of_its_border_are_here(
    real: Any, self: Migration, name: str, borders: Any
) -> bool:
    table = self._server.tables.get(name)
    return table is not None and table.begun


ELASTIC_BUGS["a host is used again while its workers end"] = lambda: patch.object(
    hosts, "LATER", -hosts.ORPHAN_SECONDS
)


def _start_at_once(self: HostAgents) -> None:
    leaving, self._leaving = self._leaving, {}
    _start(self)
    self._leaving = leaving


_start = HostAgents.start
ELASTIC_BUGS["an agent starts while the workers of its predecessor end"] = lambda: patch.object(
    HostAgents, "start", _start_at_once
)


@bug(WorkerRelay, "look", ELASTIC_BUGS)
def a_worker_is_stopped_before_it_has_connected(real: Any, self: WorkerRelay) -> None:
    """Only those that are connected are looked at, and the job waits for this one for ever."""
    all_workers, connected = self._workers, self._server.silence()
    self._workers = {number: each for number, each in all_workers.items() if number in connected}
    real(self)
    self._workers = all_workers


ELASTIC_BUGS["a slot is used again that had nothing for a worker"] = lambda: patch.object(
    Hosts, "limit", lambda self, host, slots: False
)
ELASTIC_BUGS["a folder stays on a host that was not reached"] = lambda: patch.object(
    HostAgents, "tidy_later", lambda self, agent: None
)
ELASTIC_BUGS["workers outlive the loss of the launcher"] = lambda: patch.object(
    Agent, "_end_ranks", lambda self, patience_seconds: None
)
PS_BUGS["rows of the step before are forgotten"] = lambda: patch.object(
    RowTable, "_keep", lambda self, gradients: None
)


@bug(RowTable, "replace", PS_BUGS)
def rows_that_a_checkpoint_has_not_stay(
    real: Any, self: RowTable, values: Sequence[Array], state: Mapping[str, Array]
) -> None:
    """They were made after it, and are to begin anew where all go back to it."""
    ids, rows = (array.copy() for array in self.updater.values())
    real(self, values, state)
    others = ~np.isin(ids, values[0])
    both = (ids[others], values[0]), (rows[others].reshape(-1), values[1].reshape(-1))
    self.updater.begin([np.concatenate(each) for each in both])


PS_BUGS["a file is renamed before it is on disk"] = lambda: patch.object(
    disks, "sync", lambda file: None
)


@bug(ObjectState, "sync", ELASTIC_BUGS)
def what_a_sync_brings_is_no_save(real: Any, self: ObjectState) -> None:
    saved = self._saved_state
    real(self)
    self._saved_state = saved
