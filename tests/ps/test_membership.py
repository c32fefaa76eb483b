"""Who is in a cluster: who is welcome, who returns, who is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hvdlite.ps.cluster.membership import RETURN_SECONDS, Hello, Membership
from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections.messages import SCHEDULER, SERVER, WORKER, Answer


def settings(servers: int, workers: int, **words: Any) -> ClusterSettings:
    return ClusterSettings(SCHEDULER, "", servers, workers, **words)


def hello(
    role: str, name: str, number: int | None = None, counts: tuple[int, int] = (1, 2)
) -> Hello:
    return Hello(role, name, *counts, number, f"tcp://{name}" if role == SERVER else "")


def come(cluster: Membership, role: str, name: str, *, now: float = 0.0) -> list[Answer]:
    return cluster.hello(name.encode(), 7, hello(role, name), now)


def formed(**words: object) -> Membership:
    cluster = Membership(settings(1, 2, **words), 0.0)
    assert come(cluster, WORKER, "a") == come(cluster, WORKER, "b") == []
    answers = come(cluster, SERVER, "s")
    assert [(answer.peer, answer.message.kind) for answer in answers] == [
        (b"a", "welcome"), (b"b", "welcome"), (b"s", "welcome"),
    ]  # fmt: skip
    return cluster


def test_all_are_welcome_when_the_last_one_has_come() -> None:
    cluster = formed()
    (answer,) = come(cluster, WORKER, "a")  # sent again
    assert answer.message.body["number"] == 0
    come(cluster, SERVER, "s")  # This process has not been started again.
    assert cluster.describe()["servers"] == answer.message.body["servers"] == [[0, "tcp://s", 1]]
    assert answer.message.body["workers"] == [0, 1]


def test_who_has_not_come_is_named_to_all_who_wait() -> None:
    cluster = Membership(settings(2, 3, start_seconds=10), 0.0)
    counts = (2, 3)
    cluster.hello(b"a", 1, hello(WORKER, "a", counts=counts), 0.0)
    cluster.hello(b"s", 2, hello(SERVER, "s", counts=counts), 0.0)
    assert cluster.tick(9.0) == []
    answers = cluster.tick(10.0)
    assert {answer.peer for answer in answers} == {b"a", b"s"}
    assert answers[0].message.body["why"] == (
        "server 1 and workers 1, 2 had not come after 10 seconds (--start-timeout)"
    )
    (late,) = cluster.hello(b"b", 3, hello(WORKER, "b", counts=counts), 11.0)
    assert late.message.kind == "refused"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (hello(WORKER, "x"), "all 2 workers are there"),
        (hello(SERVER, "x"), "all 1 servers are there"),
        (hello(WORKER, "x", counts=(1, 3)), "has 2 workers, and this worker was told of 3"),
        (hello(WORKER, "x", counts=(4, 2)), "has 1 servers, and this worker was told of 4"),
        (hello(WORKER, "x", number=2), "there is no worker 2"),
        (hello("scheduler", "x"), "the role is 'scheduler'"),
    ],
)  # fmt: skip
def test_who_does_not_fit_is_refused_and_the_others_are_untouched(given: Hello, said: str) -> None:
    cluster = formed()
    before = cluster.describe()
    (answer,) = cluster.hello(b"x", 9, given, 1.0)
    assert (answer.peer, answer.message.kind) == (b"x", "refused")
    assert said in answer.message.body["why"]
    assert cluster.describe() == before


def test_a_server_that_is_started_again_has_its_number_and_a_new_incarnation() -> None:
    cluster = formed()
    (answer,) = cluster.hello(b"s2", 1, hello(SERVER, "s", 0), 5.0)
    assert (answer.message.body["number"], answer.message.body["incarnation"]) == (0, 2)
    (answer,) = cluster.hello(b"s3", 1, hello(SERVER, "elsewhere", 0), 6.0)
    assert answer.message.body["servers"] == [[0, "tcp://elsewhere", 3]]


def test_of_two_processes_with_one_number_the_first_is_refused_and_both_are_named() -> None:
    cluster = Membership(settings(1, 1), 0.0)
    first, second = b"worker 0 17@one f00", b"worker 0 23@two ba7"
    mine = hello(WORKER, "x", 0, (1, 1))
    assert cluster.hello(first, 1, mine, 0.0) == []
    assert cluster.hello(second, 1, hello(WORKER, "y", 0, (1, 1)), 1.0) == []
    for _ in range(2):
        (answer,) = cluster.hello(first, 2, mine, 2.0)  # It still waits, and asks again.
        assert (answer.peer, answer.message.kind) == (first, "refused")
        why = answer.message.body["why"]
        assert "worker 0 is the process 23@two now, and this is the process 17@one" in why
        assert not answer.message.body["failed"]
    (server, welcome) = sorted(cluster.hello(b"s", 1, hello(SERVER, "s", 0, (1, 1)), 3.0))
    assert (server.peer, welcome.peer) == (b"s", second)
    assert not cluster.beat(first, 4.0) and cluster.beat(second, 4.0)


def test_an_independent_worker_that_is_silent_is_left_out_until_it_returns() -> None:
    cluster = formed(independent=True, worker_seconds=30)
    cluster.beat(b"s", 30.0)
    cluster.beat(b"a", 20.0)
    cluster.tick(30.0)
    assert cluster.workers() == [0]
    (answer,) = come(cluster, WORKER, "b", now=40.0)
    assert (answer.message.body["number"], answer.message.body["workers"]) == (1, [0, 1])
    cluster.tick(90.0)
    assert cluster.workers() == []
    (answer,) = come(cluster, WORKER, "c", now=91.0)  # takes the place of a lost one
    assert answer.message.body["number"] == 0


def test_ranks_of_a_job_are_not_given_up() -> None:
    cluster = formed()
    cluster.beat(b"s", 1000.0)
    cluster.tick(1000.0)
    assert cluster.workers() == [0, 1]


def test_more_independent_workers_come_and_leave() -> None:
    cluster = formed(independent=True)
    (answer,) = come(cluster, WORKER, "d", now=1.0)
    assert answer.message.body["why"] == "all 2 workers are there"
    (answer,) = cluster.hello(b"c", 1, replace(hello(WORKER, "c"), joins=True), 1.0)
    assert answer.message.body["number"] == 2
    cluster.leave(b"a")
    assert cluster.workers() == [1, 2]
    (answer,) = come(cluster, WORKER, "d", now=2.0)
    assert answer.message.body["number"] == 0


def test_who_joins_takes_no_place_of_those_who_may_come_back() -> None:
    """A scheduler that has come again without its file knows none of its members."""
    joins = replace(hello(SERVER, "j"), joins=True)
    cluster = Membership(settings(1, 2), 100.0)
    assert cluster.hello(b"j", 1, joins, 101.0) == []
    come(cluster, SERVER, "s", now=102.0)
    come(cluster, WORKER, "a", now=102.0)
    come(cluster, WORKER, "b", now=102.0)
    (answer,) = cluster.hello(b"j", 1, joins, 103.0)
    assert answer.message.body["number"] == 1
    assert [number for number, *_ in answer.message.body["servers"]] == [0, 1]
    alone = Membership(settings(1, 2), 100.0)
    alone.hello(b"j", 1, joins, 100.0 + RETURN_SECONDS)
    assert alone.describe()["servers"] == [[0, "tcp://j", 1]]


def test_a_lost_server_is_the_end_and_is_named() -> None:
    cluster = formed(server_seconds=300)
    cluster.tick(299.0)
    assert cluster.failure == ""
    cluster.tick(300.0)
    assert "server 0 (tcp://s) is lost" in cluster.describe()["failure"]


def test_who_has_left_is_not_taken_in_again_by_what_comes_late() -> None:
    cluster = formed()
    assert cluster.leave(b"a")
    assert cluster.beat(b"a", 1.0)  # else it would say hello
    assert come(cluster, WORKER, "a", now=1.0) == []
    assert cluster.leave(b"a")  # sent again
    assert cluster.workers() == [1]
    cluster.hello(b"a, started again", 1, hello(WORKER, "a"), 2.0)
    assert cluster.workers() == [0, 1]


def test_a_lost_worker_does_not_hold_up_the_end() -> None:
    cluster = formed(independent=True, worker_seconds=30)
    cluster.leave(b"a")
    cluster.beat(b"s", 30.0)
    assert not cluster.is_over
    cluster.tick(30.0)
    assert not cluster.is_over  # the server is there
    cluster.leave(b"s")
    assert cluster.is_over


def test_a_scheduler_that_comes_again_knows_its_members() -> None:
    before = formed()
    cluster = Membership(settings(1, 2), 100.0)
    cluster.load(json.loads(json.dumps(before.state())), 100.0)
    assert cluster.describe() == before.describe()
    assert not cluster.beat(b"a", 101.0)  # it has to say hello again
    (answer,) = come(cluster, WORKER, "a", now=101.0)
    assert answer.message.body["number"] == 0
    assert cluster.tick(150.0) == []
    assert not cluster.leave(b"b")  # it may be worker 1, which has not said hello again
    assert cluster.workers() == [0, 1]
    come(cluster, WORKER, "b", now=151.0)
    come(cluster, SERVER, "s", now=151.0)
    assert cluster.leave(b"b") and cluster.leave(b"a stranger")
    assert cluster.workers() == [0]
