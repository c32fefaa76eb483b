"""The table of pending entries: what happens to one whose data are exchanged without the engine."""

from __future__ import annotations

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.engine.pending import PendingTable
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request

LOST = HorovodInternalError("rank 1 is gone", rank=1)


def let_go(table: PendingTable, entry: Entry, *, exchanged: bool) -> list[Entry]:
    """What has left the table, and failed if the table is closed and it was not exchanged."""
    ended: list[Entry] = []
    error = table.let_go([entry], ended, exchanged=exchanged)
    for each in ended if error is not None else ():
        each.handle.fail(error)  # type: ignore[arg-type]
    return ended


def new_entry() -> Entry:
    return Entry(Request(0, "x", "allreduce"))


@pytest.fixture
def table() -> PendingTable:
    return PendingTable(0)


@pytest.fixture
def entry(table: PendingTable) -> Entry:
    made = new_entry()
    table.add([made])
    assert table.hold([made])
    return made


def test_a_held_entry_does_not_fail_with_the_engine_if_its_data_were_exchanged(
    table: PendingTable, entry: Entry
) -> None:
    table.close(LOST)
    assert not entry.handle.poll()
    assert let_go(table, entry, exchanged=True) == [entry]
    entry.handle.complete(7)
    assert entry.handle.wait() == 7


def test_a_held_entry_fails_after_the_engine_if_its_data_were_not_exchanged(
    table: PendingTable, entry: Entry
) -> None:
    table.close(LOST)
    assert let_go(table, entry, exchanged=False) == [entry]
    with pytest.raises(HorovodInternalError, match="rank 1 is gone"):
        entry.handle.wait()


@pytest.mark.parametrize("exchanged", [False, True])
def test_an_entry_that_is_let_go_is_pending_again_or_complete(
    table: PendingTable, entry: Entry, exchanged: bool
) -> None:
    with pytest.raises(ValueError, match="same name"):
        table.add([new_entry()])
    assert let_go(table, entry, exchanged=exchanged) == ([entry] if exchanged else [])
    assert table.find(*entry.key) is (None if exchanged else entry)


@pytest.mark.parametrize("exchanged", [False, True])
def test_an_entry_that_was_answered_meanwhile_ends_once(
    table: PendingTable, entry: Entry, exchanged: bool
) -> None:
    assert table.pop([entry.key]) == [entry]
    assert not let_go(table, entry, exchanged=exchanged)


def test_an_entry_of_a_removed_process_set_ends_once(table: PendingTable, entry: Entry) -> None:
    assert table.pop_set(entry.key[0]) == [entry]
    assert not let_go(table, entry, exchanged=True)


def test_an_entry_that_has_failed_cannot_be_held(table: PendingTable) -> None:
    made = new_entry()
    table.add([made])
    table.close(LOST)
    assert not table.hold([made])


def test_an_entry_that_is_on_its_way_again_is_held_though_it_ran_last(
    table: PendingTable, entry: Entry
) -> None:
    table.pop([entry.key])
    table.add([entry])
    assert table.hold([entry])
    table.close(LOST)
    assert not entry.handle.poll()
    assert let_go(table, entry, exchanged=True) == [entry]


def test_entries_are_held_together_or_not_at_all(table: PendingTable) -> None:
    made, missing = new_entry(), Entry(Request(0, "missing", "allreduce"))
    table.add([made])
    assert not table.hold([made, missing])
    table.close(LOST)
    assert made.handle.poll()


def test_closing_spares_what_is_about_to_be_completed_after_it_ran_in_the_last_segment(
    table: PendingTable, entry: Entry
) -> None:
    """The engine may close the table before the thread that let an entry go completes it."""
    let_go(table, entry, exchanged=False)
    table.pop([entry.key])
    entry.complete()
    entry.handle.renew()
    table.add([entry])
    assert table.hold([entry])
    (released,) = let_go(table, entry, exchanged=True)
    table.close(LOST)
    assert not entry.handle.poll()
    released.complete(7)
    assert entry.handle.wait() == 7


def test_closing_fails_what_else_ran_while_an_entry_was_held(table: PendingTable) -> None:
    first, second = new_entry(), Entry(Request(0, "y", "allreduce"))
    table.add([first, second])
    table.pop([first.key, second.key])
    first.complete()
    first.handle.renew()
    table.add([first])
    assert table.hold([first])
    table.close(LOST)
    with pytest.raises(HorovodInternalError, match="rank 1 is gone"):
        second.handle.wait()
    assert not first.handle.poll()
