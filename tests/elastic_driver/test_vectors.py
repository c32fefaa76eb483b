"""The vectors of Horovod's documents and tests: host order, cool-downs, kinds, discovery output."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.base.host_update import HostUpdateResult, compare_hosts
from hvdlite.common.meeting.placement import places
from hvdlite.launcher.decisions.failures import Cooldowns
from hvdlite.launcher.decisions.hosts import order_hosts
from hvdlite.launcher.hosts.hosts import parse_discovery


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", {}),
        ("a", {"a": 8}),
        ("a:1\nb:4", {"a": 1, "b": 4}),
        ("a\n\nc", {"a": 8, "c": 8}),
        ("\n\n  b:2 \r\n\na\n\n", {"b": 2, "a": 8}),
        ("localhost:2\n127.0.0.1:2\n", {"localhost": 2, "127.0.0.1": 2}),
        ("gone:0\nhere:1\n", {"here": 1}),
    ],
)
def test_output_of_a_discovery_script(text: str, hosts: dict[str, int]) -> None:
    assert list(parse_discovery(text, 8).items()) == list(hosts.items())


@pytest.mark.parametrize("line", ["a:x", "a b", "rm -rf", "a:1:2", ":2", "a:-1", "ä" * 1000])
def test_rubbish_of_a_discovery_script(line: str) -> None:
    with pytest.raises(ConfigError, match=r"line 3: .* name or name:slots") as error:
        parse_discovery(f"good:1\n\n{line}\n", 1)
    assert repr(line)[:50] in str(error.value)
    assert len(str(error.value)) < 400


def test_a_host_that_is_printed_twice_is_named() -> None:
    with pytest.raises(ConfigError, match="line 2: 'a:2': host a is given twice"):
        parse_discovery("a:1\na:2", 1)


def test_kinds_of_successive_discoveries() -> None:
    answers: list[dict[str, int]] = [{}, {"x": 1}, {"x": 1, "y": 3}, {"y": 3}, {"y": 2, "z": 1}]
    answers += [{"y": 2, "z": 1}, {"z": 1, "y": 2}, {"z": 3, "y": 2}, {"z": 2, "y": 2}]
    kinds = [compare_hosts(before, after).name for before, after in itertools.pairwise(answers)]
    assert kinds == ["added", "added", "removed", "mixed", *["no_update"] * 2, "added", "removed"]
    assert [int(kind) for kind in HostUpdateResult.__members__.values()] == [0, 1, 2, 3]


def test_old_hosts_keep_their_order_and_new_ones_follow() -> None:
    assert order_hosts(["p", "q", "r", "s"], ["t", "s", "q"]) == ["q", "s", "t"]
    assert order_hosts([], ["b", "a"]) == ["b", "a"]


def test_places_of_ranks() -> None:
    hosts = list("aabbb")
    got = [[place[key] for place in places(hosts)] for key in places(hosts)[0]]
    assert dict(zip(places(hosts)[0], got, strict=True)) == {
        "RANK": [0, 1, 2, 3, 4],
        "SIZE": [5] * 5,
        "LOCAL_RANK": [0, 1, 0, 1, 2],
        "LOCAL_SIZE": [2, 2, 3, 3, 3],
        "CROSS_RANK": [0, 0, 1, 1, 0],
        "CROSS_SIZE": [2, 2, 2, 2, 1],
    }


@pytest.mark.parametrize(
    ("given", "random", "delays"),
    [
        ((10, 100), 0.0, [20, 40, 80, 100, 100]),
        ((10, 100), 1.0, [30, 50, 90, 100, 100]),
        ((1, 2), 0.5, [2, 2, 2]),
        ((3600, 3600), 0.5, [3600, 3600]),
        (None, 0.5, [float("inf")]),
    ],
)
def test_cooldowns_grow(given: Any, random: float, delays: list[float]) -> None:
    cooldowns, now = Cooldowns(given, lambda: random), 5.0
    for delay in delays:
        assert not cooldowns.excluded("h", now)
        cooldowns.exclude("h", now)
        assert cooldowns.until("h") - now == delay
        cooldowns.exclude("h", now + 1)  # changes nothing
        assert cooldowns.until("h") - now == delay
        assert not cooldowns.excluded("other", now)
        assert cooldowns.excluded("h", now + min(delay * 0.99, 1e9))
        now += delay


def test_many_failures_of_a_host_are_no_number_too_large() -> None:
    cooldowns, now = Cooldowns((1, 3600), lambda: 0.0), 0.0
    for _ in range(3000):
        cooldowns.exclude("h", now)
        now = cooldowns.until("h")
    assert cooldowns.next_end(now - 1) == now


@pytest.mark.parametrize("given", [(0, 10), (1, 3601), (20, 10)])
def test_bad_ranges_of_cooldowns(given: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{given[0]} to {given[1]} seconds"):
        Cooldowns(given, lambda: 0.0)
