"""Process sets from world to world: made of workers, and numbered alike on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.test_worlds import stop
from tests.elastic.workers import Workers, job

pytestmark = pytest.mark.timeout(120)

MODULE = "worker_sets"
# The workers of each set in the first world; "alone" is gone as soon as worker 2 is.
SETS = {"pair": {0, 1}, "rest": {1, 2, 3}, "late": {2, 3}, "alone": {2}}


def check_sets(workers: Workers, epoch: int) -> None:
    """All ranks of a world agree about every set, whose ranks are those of its living workers."""
    members = workers.driver.worlds[epoch]
    tables = []
    for number in members:
        table = workers.wait_for(
            number, lambda line: line.get("epoch") == epoch and "table" in line
        )
        tables.append(table["table"])
        lines = {
            line["set"]: line
            for line in workers.lines(number)
            if line.get("epoch") == epoch and "set" in line
        }
        for name, line in lines.items():
            living = [each for each in members if each in SETS[name]]
            assert line["ranks"] == [members.index(each) for each in living], (number, line)
            assert (line["id"] is None) == (not living)
            total = sum(each + 1 for each in living) if number in living else None
            assert line["sum"] == total, (number, line)
        assert lines.keys() >= {"pair", "rest"}
    assert tables == [tables[0]] * len(tables)
    named = [[members.index(each) for each in members if each in SETS[name]] for name in SETS]
    ends = sorted({0, len(members) - 1})
    for ranks in list(tables[0].values())[1:]:
        assert ranks in named or ranks == ends  # no formed set of an earlier world
    assert ends in tables[0].values()
    for rank in ends:
        line = workers.wait_for(
            members[rank], lambda line: line.get("epoch") == epoch and "formed" in line
        )
        assert line["formed"] == sum(members[each] + 1 for each in ends)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_sets_follow_their_workers(tmp_path: Path, victim: int) -> None:
    with job(tmp_path, 4, MODULE, hosts="a,a,b,b") as workers:
        driver = workers.driver
        check_sets(workers, 1)
        driver.size, driver.admits = 1, False
        workers.kill(victim)
        driver.wait_for_world(2)
        check_sets(workers, 2)
        workers.start(4, MODULE)
        driver.wait_for(lambda: 4 in driver.commits)
        driver.notice(2)
        driver.wait_for_world(3)
        check_sets(workers, 3)
        workers.kill(3)
        driver.wait_for_world(4)
        check_sets(workers, 4)
        stop(workers, victim, 3)
