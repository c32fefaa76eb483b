"""Who is missing while MPI starts, from what launchers say, without MPI."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

import pytest

from hvdlite.common.meeting.launch import MPI, Launch
from hvdlite.common.runtime.start_watch import StartWatch


def launch(job: str, rank: int, size: int, local_rank: int, local_size: int) -> Launch:
    return Launch(MPI, rank, size, local_rank, local_size, job)


def watches(size: int, local_size: int, ranks: dict[int, int]) -> list[StartWatch]:
    """The watches of ``rank -> local rank`` of one host."""
    job = secrets.token_hex(8)
    return [
        StartWatch(launch(job, rank, size, local, local_size), 60) for rank, local in ranks.items()
    ]


@pytest.mark.parametrize(
    ("size", "local_size", "present", "text"),
    [
        (3, 3, {0: 0, 1: 1}, "rank 2 on this host"),
        (4, 4, {1: 1}, "ranks 0, 2, 3 on this host"),
        (4, 2, {0: 0}, "local rank 1 on this host"),
        (4, 2, {2: 0, 3: 1}, "of ranks 0, 1, on other hosts, at least one has not"),
        (2, 2, {0: 0, 1: 1}, "all ranks on this host"),
    ],
)
def test_who_is_missing(size: int, local_size: int, present: dict[int, int], text: str) -> None:
    with ExitStack() as init:
        for watch in [init.enter_context(watch) for watch in watches(size, local_size, present)]:
            error = str(watch.give_up())
            assert text in error and "the limit is 60 s: HVDLITE_START_TIMEOUT" in error, error


def test_a_job_that_has_no_name_says_so_without_ranks() -> None:
    with StartWatch(launch("", 0, 2, 0, 2), 60) as watch:
        assert "some ranks have not called init()" in str(watch.give_up())


def test_ranks_of_another_job_do_not_count() -> None:
    (mine,), (theirs,) = watches(2, 2, {0: 0}), watches(2, 2, {1: 1})
    with theirs, mine:
        assert "rank 1 on this host" in str(mine.give_up())


def test_a_part_of_the_world_waits_for_its_own_ranks() -> None:
    (watch,) = watches(4, 4, {0: 0})
    with watch:
        watch.expected = [0, 3]
        assert ": rank 3 on this host" in str(watch.give_up())
