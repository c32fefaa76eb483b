"""What members tell the scheduler of their tables; it costs as much for each of many as for one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from hvdlite.ps.cluster.enrolment import Enrolment
from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections.messages import WORKER, Message
from hvdlite.ps.server.migration import Migration
from hvdlite.ps.server.running import _end_of
from hvdlite.ps.worker.layout_follower import LayoutFollower


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
