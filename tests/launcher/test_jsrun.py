"""jsrun's hosts, its file of resources and its command line."""

from __future__ import annotations

import re

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.hosts import Host, parse_hosts
from hvdlite.launcher.jsrun import compute_hosts, jsrun_command, resource_file

TWO = (Host("h1", 4), Host("h2", 4))


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("batch5:1,h1:42,h2:42", "h1:42,h2:42"),
        ("h1:42,h2:42", "h1:42,h2:42"),
        ("h1:1,h2:1", "h1:1,h2:1"),
        ("h1:1", "h1:1"),
        ("h1:1,h2:42,h3:1", "h1:1,h2:42,h3:1"),
    ],
)
def test_the_launch_node_is_no_host_of_ranks(hosts: str, expected: str) -> None:
    assert ",".join(map(str, compute_hosts(parse_hosts(hosts)))) == expected


def test_a_file_of_resources() -> None:
    assert resource_file(TWO, (2, 1)) == (
        "overlapping_rs: allow\n"
        "cpu_index_using: logical\n"
        "\n"
        "rank: 0: { hostname: h1; cpu: {0-1} ; gpu: * ; mem: * }\n"
        "rank: 1: { hostname: h1; cpu: {2-3} ; gpu: * ; mem: * }\n"
        "rank: 2: { hostname: h2; cpu: {0-3} ; gpu: * ; mem: * }\n"
    )


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("slots", "count"), [(42, 6), (42, 4), (7, 7), (7, 1), (5, 0)])
def test_tasks_share_a_host_evenly_and_no_processor_twice(
    slots: int, count: int, threads: int
) -> None:
    text = resource_file([Host("h", slots)], [count], threads)
    ranges = [range(int(a), int(b) + 1) for a, b in re.findall(r"cpu: {(\d+)-(\d+)}", text)]
    used = [processor for processors in ranges for processor in processors]
    assert len(ranges) == count
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(slots * threads))
    assert {len(processors) for processors in ranges} <= {slots // max(count, 1) * threads}


def test_more_tasks_than_slots_are_refused_by_the_name_of_the_host() -> None:
    with pytest.raises(ConfigError, match="5 ranks on h1 are more than its 4 slots"):
        resource_file(TWO, (5, 0))


def test_the_command_line() -> None:
    assert jsrun_command("/opt/jsrun", "/tmp/r", ["python", "a.py"]) == [
        "/opt/jsrun", "--erf_input", "/tmp/r", "python", "a.py",
    ]  # fmt: skip
