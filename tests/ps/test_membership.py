"""Who is in a cluster: who is welcome, returns or is missing, and what members tell of tables."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from hvdlite.ps.cluster.enrolment import Enrolment
from hvdlite.ps.cluster.membership import RETURN_SECONDS, Hello, Membership
from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections.messages import SCHEDULER, SERVER, WORKER, Answer, Message
from hvdlite.ps.server.migration import Migration
from hvdlite.ps.server.running import _end_of
from hvdlite.ps.worker.layout_follower import LayoutFollower


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


# -- what members tell the scheduler: as much for each of many tables as for one


class Counted(dict[str, Any]):
    """Tables, and how often one was looked at."""

    looks = 0

    def __getitem__(self, name: str) -> Any:
        self.looks += 1
        return super().__getitem__(name)


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_server_looks_at_a_table_when_something_happens_to_it(wanted: int) -> None:
    server = SimpleNamespace(tables=Counted(), fresh=set(), touched=set(), layout=1, handlers={})
    client, many = Mock(), 300
    migration = Migration(server, 0, client, Mock())  # type: ignore[arg-type]
    news: dict[str, Any] = {"layout": 1, "change": None, "wanted": wanted, "layout_servers": 1}
    migration.look(news)
    names = [f"t{number}" for number in range(many)]
    server.tables.update({name: SimpleNamespace(begun=False, version=0) for name in names})
    server.fresh.update(names)
    for field in ("nothing", "begun", "version"):
        for name in names:
            vars(dict.__getitem__(server.tables, name))[field] = 1
            server.touched.add(name)
            migration.look(news)
            migration.look(news)
    assert not server.fresh
    # Each has its first update; that it has begun is told at once where a change waits for it.
    assert client.call.call_count == (1 + many if wanted == 1 else 2 + 2 * many)
    assert server.tables.looks <= 8 * many


def test_what_is_new_while_a_beat_is_under_way_is_told_by_one_more() -> None:
    settings = ClusterSettings(WORKER, "127.0.0.1:1", 1, 1)
    enrolment = Enrolment(Mock(), settings, changed=Mock())
    send: Any = enrolment.connection.send
    answer = Message("beat", 1)
    for _ in range(5):
        enrolment.tell()
    assert send.call_count == 1
    enrolment._receive(answer)
    assert send.call_count == 2
    enrolment._receive(answer)
    assert send.call_count == 2
    enrolment._beat()
    enrolment._beat()
    assert send.call_count == 3


def test_a_worker_tells_of_each_table_only_where_a_change_waits_for_it() -> None:
    tell = Mock()
    follower = LayoutFollower(Mock(), tell, lambda: 0)
    news: dict[str, Any] = {
        "layout": 1, "layout_servers": 1, "change": None, "load": 0, "decided": None,
    }  # fmt: skip

    def add(names: str) -> int:
        tell.reset_mock()
        for name in names:
            table = Mock(layout=1)
            table.name = name
            assert follower.add(table)
        return int(tell.call_count)

    follower.hear({**news, "wanted": 1})
    assert add("abc") == 0
    follower.hear({**news, "wanted": 2})
    assert tell.call_count == 1  # Of those that it has.
    assert set(follower.standing()["tables"]) == set("abc")
    assert add("def") == 3
    follower.hear({**news, "wanted": 1})
    assert add("ghi") == 0


@pytest.mark.parametrize(
    ("news", "told"),
    [
        ({"change": {"identity": 7, "borders": None}, "load": 0, "decided": None}, (8, 8, 3)),
        # A load undoes the steps of both, each from where it stands.
        ({"change": None, "load": 7, "decided": True}, (8, 7, 3)),
    ],
    ids=["change", "load"],
)
def test_tables_of_the_same_steps_come_to_other_servers_at_one_step(
    news: dict[str, Any], told: tuple[int, ...]
) -> None:
    request = Mock()
    follower = LayoutFollower(request, Mock(), lambda: 0)
    tables = []
    for name, clock in zip("trx", (8, 7, 3), strict=True):
        table = SimpleNamespace(
            name=name, layout=1, is_sync=True, peers=(), gate=Mock(), known_clock=clock
        )  # fmt: skip
        table.gate.close = lambda on_quiet, clock=clock: on_quiet(clock)
        tables.append(table)
        assert follower.add(table)  # type: ignore[arg-type]
    tables[0].peers, tables[1].peers = [tables[1]], [tables[0]]
    follower.hear({"layout": 1, "layout_servers": 1, "wanted": 2, **news})
    assert request.call_args[0][0].body == {
        "change": 7,
        "clocks": dict(zip("trx", told, strict=True)),
    }


def test_a_server_looks_at_the_news_of_one_moment() -> None:
    """Those that come while it looks say that the next layout counts, and name no change."""
    change = {"identity": 7, "servers": 2}
    news: dict[str, Any] = {"layout": 1, "layout_servers": 1, "change": change, "workers": [0]}
    checkpoints, migration = Mock(), Mock()
    checkpoints.look = lambda _: news.update(layout=2, layout_servers=2, change=None)
    ended = _end_of(Mock(workers={0}), migration, checkpoints, 0, news)
    assert not ended()
    (seen,) = migration.look.call_args[0]
    assert (seen["layout"], seen["change"]) == (1, change)
