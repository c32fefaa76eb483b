"""The model of allreduce between hosts: its formulas, its choice, its file, and who reads it."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import ConfigError
from hvdlite.common.collectives.between_hosts import model_file
from hvdlite.common.collectives.between_hosts.algorithms import ALGORITHMS, Choice, paths_of
from hvdlite.common.collectives.between_hosts.costs import (
    ALLREDUCE,
    COSTS,
    Model,
    bundle_is_cheaper,
    cheapest,
    cheapest_of,
)
from hvdlite.common.collectives.between_hosts.model_file import chosen_model, load, save
from hvdlite.common.collectives.between_hosts.schedules import (
    Move,
    Round,
    Schedule,
    doubling,
    halving,
)
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from tests.ranks import run_ranks

NOTHING = Model(*[0.0] * len(Model.names()))


def ring(size: int, index: int) -> Schedule:
    """A ring as a schedule: chunks go around it, first partial sums and then results."""

    def step(block: int, partial: bool) -> Round:
        sent, got = block % size, (block - 1) % size
        return Round(
            (Move((index + 1) % size, sent, sent + 1, partial),),
            (Move((index - 1) % size, got, got + 1, partial),),
        )

    reduce = [step(index - number, True) for number in range(size - 1)]
    gather = [step(index + 1 - number, False) for number in range(size - 1)]
    own = (index + 1) % size
    reduce[-1] = reduce[-1]._replace(finished=((own, own + 1),))
    return Schedule(tuple(range(size)), (*reduce, *gather), 1)


def schedules(name: str, size: int) -> list[Schedule]:
    scheduler = ALGORITHMS[name].scheduler or ring
    return [scheduler(size, index) for index in range(size)]


@pytest.mark.parametrize("name", COSTS[ALLREDUCE])
@pytest.mark.parametrize("size", [3, 4, 5, 8, 12, 16, 31, 64])
def test_rounds_and_bytes_are_those_of_the_schedules(name: str, size: int) -> None:
    members = schedules(name, size)
    cost = COSTS[ALLREDUCE][name](replace(NOTHING, byte=1.0, far_byte=1.0), size, 1, 1.0)
    assert cost.rounds == len(members[0].rounds)
    sent = [
        sum(m.stop - m.start for each in member.rounds for m in each.sends) / len(member.layout)
        for member in members
    ]
    received = [
        sum(m.stop - m.start for each in member.rounds for m in each.receives) / len(member.layout)
        for member in members
    ]
    assert cost.wire == pytest.approx(max(*sent, *received))
    added = [
        sum(m.stop - m.start for e in member.rounds for m in e.receives if m.partial)
        / len(member.layout)
        for member in members
    ]
    work = COSTS[ALLREDUCE][name](replace(NOTHING, reduced_byte=1.0), size, 1, 1.0).work
    assert work == pytest.approx(max(added))


@pytest.mark.parametrize("name", COSTS["broadcast"])
@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 8, 12, 31, 64])
def test_rounds_and_bytes_of_a_broadcast_are_those_of_its_paths(name: str, hosts: int) -> None:
    paths = [paths_of(name, hosts, 0, host) for host in range(hosts)]

    def depth(way: int, host: int) -> int:
        parent = paths[host][way].parent
        return 0 if parent is None else 1 + depth(way, parent)

    cost = COSTS["broadcast"][name](replace(NOTHING, byte=1.0), hosts, 1, 1.0)
    ways = range(len(paths[0]))
    assert cost.rounds == max(depth(way, host) for way in ways for host in range(hosts))
    sent = max(sum(len(path.children) for path in each) / len(each) for each in paths)
    assert cost.wire == pytest.approx(sent)


@pytest.mark.parametrize("hosts", [3, 4, 5, 8, 31, 64])
def test_rounds_and_bytes_of_gathers_and_scatters_are_those_of_the_schedules(hosts: int) -> None:
    model = replace(NOTHING, byte=1.0, far_byte=1.0)
    for cost, scheduler in (
        (COSTS["gather"]["doubling"], doubling), (COSTS["scatter"]["halving"], halving),
    ):  # fmt: skip
        schedule = scheduler(hosts, 0)
        found = cost(model, hosts, 1, 1.0)
        assert found.rounds == len(schedule.rounds)
        blocks = sum(move.stop - move.start for each in schedule.rounds for move in each.sends)
        assert found.wire == pytest.approx(blocks / hosts)
    for collective in ("gather", "scatter"):
        ring = COSTS[collective]["ring"](model, hosts, 1, 1.0)
        assert (ring.rounds, ring.wire) == (hosts - 1, pytest.approx((hosts - 1) / hosts))


def test_the_default_figures_choose_few_rounds_for_small_and_few_bytes_for_large_data() -> None:
    model = Model()
    for collective, few in (("gather", "doubling"), ("scatter", "halving")):
        assert cheapest_of(model, collective, 8, 2, 4 << 10) == few
        assert cheapest_of(model, collective, 8, 2, 64 << 20) == "ring"
    assert cheapest_of(model, "broadcast", 2, 1, 4) == "chain"
    assert cheapest_of(model, "broadcast", 3, 1, 4) == "tree"
    assert cheapest_of(model, "broadcast", 3, 1, 64 << 20) == "chain"
    assert cheapest_of(model, "broadcast", 64, 1, 64 << 20) == "trees"
    assert bundle_is_cheaper(model, 2, 2, 4 << 10)
    assert not bundle_is_cheaper(model, 2, 2, 1 << 20)
    assert not bundle_is_cheaper(model, 1, 1, 4)


@pytest.mark.parametrize(
    ("hosts", "nbytes", "name"),
    [
        (2, 4, "doubling"),
        (2, 64 << 20, "ring"),
        (3, 4, "doubling"),
        (3, 4 << 10, "trees"),
        (4, 4, "doubling"),
        (8, 4 << 10, "doubling"),
        (7, 4 << 10, "doubling"),
        (8, 8 << 10, "halving"),
        (8, 64 << 20, "ring"),
        (2048, 4 << 10, "doubling"),
        (2048, 1 << 20, "trees"),
        (2048, 100 << 20, "trees"),
    ],
)
def test_the_default_figures_choose(hosts: int, nbytes: int, name: str) -> None:
    assert cheapest(Model(), hosts, 8, nbytes) == name


def test_every_algorithm_is_the_cheapest_somewhere() -> None:
    models = [Model(), Model(stretch=0, far_byte=Model().byte), Model(stretch=0, far_byte=3e-9)]
    chosen = {
        cheapest(model, hosts, 8, 1 << power)
        for model in models for hosts in (4, 16, 64, 256) for power in range(2, 30)
    }  # fmt: skip
    assert chosen == set(COSTS[ALLREDUCE])


def test_a_ring_of_2048_hosts_takes_many_times_as_long_as_trees() -> None:
    ring, trees = (
        COSTS[ALLREDUCE][name](Model(), 2048, 8, 97.5 * 2**20) for name in ("ring", "trees")
    )
    assert ring.seconds > 3 * trees.seconds


def test_a_fixed_choice_needs_no_model() -> None:
    assert Choice("halving").of(2048, 8, 4).name == "halving"


# -- the file
MEASURED = Model(message=1e-3, byte=1e-9, stretch=2e-6)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "model.json"
    save(path, MEASURED, {"hosts": 3})
    assert load(path) == MEASURED
    assert chosen_model(str(path)) == MEASURED
    assert [each.name for each in path.parent.iterdir()] == ["model.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: "{", "no JSON"),
        (lambda content: json.dumps([content]), '"format": 1'),
        (lambda content: json.dumps({**content, "format": 2}), '"format": 1'),
        (
            lambda content: json.dumps({"format": 1, "seconds": {"byte": 1}}),
            "must have call, message",
        ),
        (lambda content: json.dumps(with_figure(content, -1)), '"byte" is -1'),
        (lambda content: json.dumps(with_figure(content, "fast")), "\"byte\" is 'fast'"),
        (lambda content: json.dumps(with_figure(content, float("nan"))), '"byte" is nan'),
    ],
)
def test_a_file_that_is_none_is_an_error_where_it_was_named(
    change: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = model_file.usual_path()
    save(path, MEASURED, {})
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ConfigError) as caught:
        chosen_model(str(path))
    for part in (said, str(path), "HVDLITE_NETWORK_MODEL", "hvdlite.bench"):
        assert part in str(caught.value)
    with caplog.at_level(logging.WARNING, "hvdlite"):
        assert chosen_model("auto") == Model()
    assert said in caplog.text


def with_figure(content: Any, value: Any) -> Any:
    return {**content, "seconds": {**content["seconds"], "byte": value}}


def test_a_file_at_the_usual_place_is_used_unless_the_default_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert chosen_model("auto") == Model()
    save(model_file.usual_path(), MEASURED, {})
    assert chosen_model("auto") == MEASURED
    assert chosen_model("default") == Model()
    with pytest.raises(ConfigError, match=r"no_such_file.*No such file"):
        chosen_model(str(tmp_path / "no_such_file"))


def test_all_ranks_choose_by_the_file_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []

    def noted(path: Path) -> Model:
        readers.append(threading.current_thread().name)
        return load(path)

    monkeypatch.setattr(model_file, "load", noted)
    save(tmp_path / "model.json", MEASURED, {})

    def main(rank: int) -> Model:
        result = hvd.allreduce(np.full(3, float(rank)), op=hvd.Sum, name="first")
        assert result.tolist() == [10.0] * 3
        return current().engine.backends.choice.model

    config = Config(network_model=str(tmp_path / "model.json"))
    hosts = [(rank,) for rank in range(5)]
    assert run_ranks(5, main, hosts=hosts, config=config) == [MEASURED] * 5
    assert readers == ["rank-0"]
