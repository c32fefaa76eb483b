"""Hosts that come and go, fail and come back, and discovery scripts that go wrong."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest

from tests.launcher.elastic.jobs import Place, Watch
from tests.launcher.elastic_scenarios.sites import Site

pytestmark = pytest.mark.timeout(120)

NOTICED_SECONDS = 10.0  # Alone it takes one, but two cores are shared with other tests.


def numbers(places: list[Place]) -> list[int]:
    return [place.number for place in places]


def next_world(watch: Watch, size: int, old: list[Place], timeout: float = 20) -> list[Place]:
    """Wait for the first world of a size after an old one."""
    return watch.world(size, epoch=old[0].epoch + 1, timeout=timeout)


def test_hosts_and_slots_come_and_go(site: Site) -> None:
    """Ranks go host by host, old ones keep their order, and nothing is done twice."""
    a, b, c = site.hosts
    words = ("-np", "2", "--min-np", "1", "--max-np", "4", *site.discovery(f"{a}:2"))
    with site.elastic(*words) as watch:
        first = watch.world(2)
        site.show(f"{a}:2", f"{b}:1")
        three = watch.world(3)
        assert numbers(three)[:2] == numbers(first)
        site.show(f"{a}:2", f"{b}:2")
        four = watch.world(4)
        assert numbers(four)[:3] == numbers(three)
        assert [(place.host, place.local) for place in four] == [(a, 0), (a, 1), (b, 0), (b, 1)]
        site.show(f"{a}:2", f"{b}:2", f"{c}:2")  # Beyond --max-np: nobody is disturbed.
        site.wait_until_seen()
        assert max(place.epoch for place in watch.places()) == four[0].epoch
        site.show(f"{a}:1", f"{b}:2")
        lowered = next_world(watch, 3, four)
        assert numbers(lowered) == [four[0].number, four[2].number, four[3].number]
        site.show(f"{b}:2")  # The host of rank 0 goes.
        left = next_world(watch, 2, lowered)
        assert numbers(left) == numbers(lowered)[1:]
        site.show(f"{c}:1", f"{b}:2")  # Old hosts come first, whatever the script says.
        last = next_world(watch, 3, left)
        assert numbers(last)[:2] == numbers(left)
        assert (last[2].host, last[2].step) == (c, last[0].step)
        assert site.end(watch) == 0
    assert not any("lost" in line or "failed" in line for line in watch.out + watch.err), watch.err


@pytest.mark.parametrize(
    "what", ["all its processes", pytest.param("its agent", marks=pytest.mark.soak)]
)
def test_a_host_whose_processes_die_is_lost_at_once(site: Site, what: str) -> None:
    with site.elastic("-np", "4", "--min-np", "2", "-H", site.spread(4, hosts=2)) as watch:
        first = watch.world(4)
        lost = [place for place in first if place.host == site.hosts[1]]
        pids = [site.outside(place.host, place.pid) for place in lost]
        agent = site.agent(lost[0])
        for pid in [agent, *(pids if what == "all its processes" else [])]:
            with contextlib.suppress(ProcessLookupError):  # It dies with its agent.
                os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        left = next_world(watch, 4 - len(lost), first)
        assert time.monotonic() - begin < NOTICED_SECONDS
        assert numbers(left) == [place.number for place in first if place not in lost]
        watch.line(site.hosts[1])
        deadline = begin + NOTICED_SECONDS
        while running := [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")]:
            assert time.monotonic() < deadline, running
            time.sleep(0.01)
        assert site.end(watch) == 0


def test_a_host_that_fails_comes_back_after_its_cooldown_again_and_again(site: Site) -> None:
    words = ("-np", "2", "--min-np", "1", "-H", f"{site.hosts[0]}:1,{site.hosts[1]}:1")
    with site.elastic(*words, "--blacklist-cooldown-range", "1", "2") as watch:
        two = watch.world(2)
        for _ in range(2):
            site.kill(two[1])
            begin = time.monotonic()
            (left,) = next_world(watch, 1, two)
            two = next_world(watch, 2, [left])
            assert 1.9 < time.monotonic() - begin < 30
            assert two[0].number == left.number and two[1].host == site.hosts[1]
        assert site.end(watch) == 0


def test_without_a_range_a_host_that_fails_never_comes_back(site: Site) -> None:
    hosts = [f"{host}:1" for host in site.hosts[:2]]
    words = ("--as-horovod", "-np", "2", "--min-np", "1", *site.discovery(*hosts))
    with site.elastic(*words) as watch:
        site.kill(watch.world(2)[1])
        (left,) = watch.world(1)
        site.show(hosts[0], f"{site.hosts[1]}:2")  # Also with more slots than before.
        site.wait_until_seen()
        assert max(place.epoch for place in watch.places()) == left.epoch
        assert site.end(watch) == 0


# What the script does is said by the file beside it.
SCRIPTED = """\
case "$(cat {mode})" in
  fails) echo no cluster >&2; exit 3;;
  rubbish) echo {first}:1; echo 'a b c';;
  hangs) sleep 1000;;
  *) cat {hosts};;
esac"""


def test_a_discovery_script_that_goes_wrong_later_changes_nothing(site: Site) -> None:
    """Its last answer counts; the order of its lines is that of the ranks."""
    first, second, third = site.hosts
    text = SCRIPTED.format(mode=site.inside / "mode", hosts=site.inside / "hosts", first=first)
    (site.folder / "hosts").write_text(f"{second}:1\n\n{first}:1\n")
    mode = site.folder / "mode"
    mode.write_text("well")
    with site.elastic("-np", "2", "--min-np", "1", *site.script(text)) as watch:
        two = watch.world(2)
        assert [place.host for place in two] == [second, first]
        mode.write_text("fails")
        assert "exit code 3 and said: no cluster" in watch.line("discovery failed")
        mode.write_text("rubbish")
        watch.line(r"line 2: 'a b c'")
        site.kill(two[1])  # Its slot is still there.
        again = next_world(watch, 2, two)
        assert numbers(again)[0] == numbers(two)[0]
        (site.folder / "hosts").write_text(f"{second}:1\n{first}:1\n{third}:1\n")
        mode.write_text("well")
        three = watch.world(3)
        assert [place.host for place in three] == [second, first, third]
        assert site.end(watch) == 0
    assert not any(re.search(r"were? removed", line) for line in watch.err), watch.err


@pytest.mark.soak
def test_a_discovery_script_that_hangs_later_is_killed_and_asked_again(site: Site) -> None:
    """It has 10 seconds."""
    text = SCRIPTED.format(
        mode=site.inside / "mode", hosts=site.inside / "hosts", first=site.hosts[0]
    )
    (site.folder / "hosts").write_text(f"{site.hosts[0]}:1\n")
    mode = site.folder / "mode"
    mode.write_text("well")
    with site.elastic("-np", "1", "--min-np", "1", *site.script(text)) as watch:
        watch.world(1)
        mode.write_text("hangs")
        watch.line("not ended within 10 seconds", timeout=20)
        (site.folder / "hosts").write_text(f"{site.hosts[0]}:2\n")
        mode.write_text("well")
        assert watch.world(2)[0].pid == watch.world(1)[0].pid
        assert site.end(watch) == 0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.soak)]
)
def test_a_signal_to_the_launcher_in_a_reset_leaves_nothing(site: Site, number: int) -> None:
    with site.elastic("-np", "4", "--min-np", "1", "-H", site.spread(4)) as watch:
        first = watch.world(4)
        site.kill(first[1])
        site.signal_launcher(watch, number)
        watch.finish(10)
        deadline = time.monotonic() + 4
        while any(site.workers().values()):
            assert time.monotonic() < deadline, site.workers()
            time.sleep(0.02)
