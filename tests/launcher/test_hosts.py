"""Hosts and slots, from the flag and from a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.hosts.hosts import (
    Host,
    parse_discovery,
    parse_hosts,
    ranks_per_host,
    read_hostfile,
)


def test_hosts_have_a_name_and_slots() -> None:
    assert parse_hosts("a:2, b-1.example.org:4,c") == (
        Host("a", 2),
        Host("b-1.example.org", 4),
        Host("c", 1),
    )


@pytest.mark.parametrize(
    "text", ["", "a:", "a:x", "a:2:3", "a b:2", "a:2,,b:2", "a:-1", ":2", "a:\u0662", "node[1-3]"]
)
def test_a_bad_host_is_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--hosts: .* must be given as name:slots$"):
        parse_hosts(text)


def test_a_host_that_ssh_would_take_for_a_flag_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\n-F/tmp/x slots=2\n-v slots=2\n")
    (tmp_path / "good").write_text("a\n-v slots=2\n")
    words = "the name of a host must not begin with '-'"
    with pytest.raises(ConfigError, match=f"^--hosts: ' -v:2': {words}$"):
        parse_hosts("a:1, -v:2")
    with pytest.raises(ConfigError, match=r"line 2: '-F/tmp/x slots=2': a host must be given"):
        read_hostfile(str(tmp_path / "hosts"))
    with pytest.raises(ConfigError, match=f"good, line 2: '-v slots=2': {words}$"):
        read_hostfile(str(tmp_path / "good"))
    with pytest.raises(ConfigError, match=f"^discovery script, line 1: '-v:2': {words}$"):
        parse_discovery("-v:2", 1)


def test_a_host_without_a_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a:0': a host must have at least one slot"):
        parse_hosts("a:0")


def refusals(tmp_path: Path, host: str, line: str) -> Iterator[str]:
    """What -H, a hostfile and the output of a discovery script say of a host."""
    (tmp_path / "hosts").write_text(line)
    for read in (
        lambda: parse_hosts(host),
        lambda: read_hostfile(str(tmp_path / "hosts")),
        lambda: parse_discovery(host, 1),
    ):
        with pytest.raises(ConfigError) as raised:
            read()
        yield str(raised.value)


@pytest.mark.parametrize("slots", [65536, 99999999999999999999, "9" * 5000])
def test_slots_are_limited(tmp_path: Path, slots: int | str) -> None:
    for message in refusals(tmp_path, f"a:{slots}", f"a slots={slots}"):
        assert message.endswith(": a host must have at most 65535 slots")
    with pytest.raises(ConfigError, match="line 1: 'a': a host must have at most 65535 slots"):
        parse_discovery("a", 65536)
    assert parse_hosts("a:65535")[0].slots == 65535 == parse_discovery("a:65535", 1)["a"]


@pytest.mark.parametrize("host", ["::1", "[::1]:2", "fe80::1:2", "1:2:3:4:5:6:7:8", "[fe80::1]"])
def test_a_host_with_an_ipv6_address_needs_a_name(tmp_path: Path, host: str) -> None:
    for message in refusals(tmp_path, host, host):
        assert f"{host!r}: a host must be given by a name or an IPv4 address, as name" in message
        assert "IPv6" in message


def test_a_host_is_given_once() -> None:
    with pytest.raises(ConfigError, match="host a is given twice"):
        parse_hosts("a:1,b:1,a:2")


def test_a_hostfile_may_have_comments_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two machines\na slots=2\n\nb   slots = 4 # the big one\nc\n"
                    "d.job.ns.svc:3  # as Intel MPI and MPICH write it\n")  # fmt: skip
    assert read_hostfile(str(path)) == (
        Host("a", 2),
        Host("b", 4),
        Host("c", 1),
        Host("d.job.ns.svc", 3),
    )


@pytest.mark.parametrize(
    "line",
    ["a slots=x", "a 2", "a slots", "a:", "a:2 slots=2", "a:x", "slots=2 a", "a slots=-1",
     "a slots=\u0662"],
)  # fmt: skip
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"# comment\nok slots=1\n{line}\n")
    with pytest.raises(
        ConfigError, match=r"hosts, line 3: .* must be given as name slots=number, "
    ):
        read_hostfile(str(path))


def test_a_hostfile_must_exist_and_name_a_host(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--hostfile: cannot read"):
        read_hostfile(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(str(tmp_path / "empty"))


def test_a_hostfile_may_begin_with_the_mark_of_its_encoding(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n", encoding="utf-8-sig")
    assert read_hostfile(str(tmp_path / "hosts")) == (Host("a", 2),)


def test_hosts_are_filled_in_their_order() -> None:
    hosts = parse_hosts("a:2,b:3,c:1")
    assert ranks_per_host(hosts, 6) == (2, 3, 1)
    assert ranks_per_host(hosts, 3) == (2, 1, 0)
    with pytest.raises(ConfigError, match="-np 7 asks for more ranks than the 6 slots") as raised:
        ranks_per_host(hosts, 7)
    assert "-np 6 at most, or give the hosts more slots (name:slots)" in str(raised.value)


def test_this_host_is_not_remote() -> None:
    assert not Host("localhost", 1).remote
    assert not Host("127.0.0.1", 1).remote
    assert Host("another-host.example.org", 1).remote
