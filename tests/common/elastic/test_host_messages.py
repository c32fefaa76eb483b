"""The two private attributes of a state that scripts for Horovod use."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from hvdlite.common.base.errors import HostsUpdatedInterrupt
from hvdlite.common.base.host_update import HostUpdateResult
from hvdlite.common.elastic.state import State

ADDED, REMOVED = HostUpdateResult.added, HostUpdateResult.removed


class Empty(State):
    def save(self) -> None:
        pass


def state_of(received: list[Any] | None = None) -> State:
    """Return a state of one rank, which appends what it broadcasts to `received`."""

    def broadcast(sent: Any) -> Any:
        if received is not None:
            received.append(sent)
        return sent

    return Empty(bcast_object=broadcast, get_rank=lambda: 0)


def interrupted(state: State) -> bool | None:
    """Return the `skip_sync` with which the state is interrupted, None if it is not."""
    try:
        state.check_host_updates()
    except HostsUpdatedInterrupt as interrupt:
        return interrupt.skip_sync
    return None


def test_both_are_there_from_the_start() -> None:
    state = state_of()
    assert type(state._last_updated_timestamp) is int and state._last_updated_timestamp == 0
    assert isinstance(state._host_messages, queue.Queue) and state._host_messages.empty()
    assert interrupted(state) is None


@pytest.mark.parametrize(
    ("kinds", "skip_sync"),
    [
        ([ADDED], False),
        ([REMOVED], True),
        ([REMOVED, REMOVED], True),
        ([REMOVED, ADDED], False),
        ([ADDED, REMOVED], False),
    ],
)
def test_kinds_of_all_new_messages_count(kinds: list[HostUpdateResult], skip_sync: bool) -> None:
    received: list[Any] = []
    state = state_of(received)
    for timestamp, kind in enumerate(kinds, 5):
        state.on_hosts_updated(timestamp, kind)
    assert not state._host_messages.empty()
    assert interrupted(state) is skip_sync
    newest = 4 + len(kinds)
    assert received == [(0, newest, sum(set(kinds)))]
    assert state._last_updated_timestamp == newest and state._host_messages.empty()


def test_a_timestamp_that_was_seen_is_ignored_until_it_is_set_back() -> None:
    state = state_of()
    state.on_hosts_updated(7, ADDED)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    for timestamp in (7, 6):
        state.on_hosts_updated(timestamp, REMOVED)
        assert interrupted(state) is None
        assert state._last_updated_timestamp == 7 and state._host_messages.empty()
    state._last_updated_timestamp = 0
    state.on_hosts_updated(7, REMOVED)
    assert interrupted(state) is True
    assert state._last_updated_timestamp == 7


def test_a_reset_begins_with_an_empty_queue_and_keeps_the_timestamp() -> None:
    state = state_of()
    state._last_updated_timestamp = 3
    state.on_hosts_updated(9, ADDED)
    state.on_reset()
    assert state._host_messages.empty() and state._last_updated_timestamp == 3
    assert interrupted(state) is None
