"""jsrun's hosts, and its file of resources."""

from __future__ import annotations

import pytest

from hvdlite.launcher.hosts.hosts import parse_hosts
from hvdlite.launcher.platforms.batch_systems import compute_hosts, resource_file


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


@pytest.mark.parametrize(("threads", "last"), [(1, (3, 1)), (4, (15, 7))])
def test_a_file_of_resources(threads: int, last: tuple[int, int]) -> None:
    """One agent on each host has all processors of the job there."""
    assert resource_file(parse_hosts("h1:4,h2:2"), threads) == (
        "overlapping_rs: allow\n"
        "cpu_index_using: logical\n"
        "\n"
        f"rank: 0: {{ hostname: h1; cpu: {{0-{last[0]}}} ; gpu: * ; mem: * }}\n"
        f"rank: 1: {{ hostname: h2; cpu: {{0-{last[1]}}} ; gpu: * ; mem: * }}\n"
    )
