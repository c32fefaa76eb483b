"""The link of a worker and its driver: worlds, exchanges, what is late, and who is foreign."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite.common.base.errors import HorovodInternalError, HorovodVersionMismatchError
from hvdlite.common.connections import prove
from hvdlite.common.connections.prove import Software
from hvdlite.common.driver_link import frames
from hvdlite.common.driver_link import link as link_module
from hvdlite.common.driver_link.frames import Newcomer, World, world_frame
from hvdlite.common.driver_link.link import DriverLink
from tests.elastic.fake_driver import SECRET, FakeDriver
from tests.ranks import run_threads
from tests.short_calls import until

pytestmark = pytest.mark.timeout(30)
LIMIT = 10.0


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[FakeDriver]:
    driver = FakeDriver(tmp_path, 2)
    yield driver
    driver.close()


def connect(driver: FakeDriver, number: int, secret: str = SECRET) -> DriverLink:
    link = DriverLink(driver.address, number, secret.encode())
    link.on_lost = lambda code: None
    return link


def path_of(driver: FakeDriver) -> str:
    return driver.address.removeprefix("unix:")


def in_each_worker(
    driver: FakeDriver, size: int, main: Callable[[DriverLink, World], Any]
) -> list[Any]:
    """Run `main` in a thread for each worker, in the first world."""
    driver.size = size

    def run(number: int) -> Any:
        link = connect(driver, number)
        try:
            world = link.wait_for_world()
            assert isinstance(world, World)
            return main(link, world)
        finally:
            link.close()

    return run_threads(size, run)


def test_all_members_see_the_same_world_and_every_body(driver: FakeDriver) -> None:
    def main(link: DriverLink, world: World) -> Any:
        exchange = link.exchange(world)
        rounds = [
            exchange.allgather(f"{number} of {world.numbers[world.rank]}".encode())
            for number in range(3)
        ]
        return world._replace(rank=0), rounds

    results = in_each_worker(driver, 3, main)
    assert results == [results[0]] * 3
    world, rounds = results[0]
    assert (world.epoch, sorted(world.numbers)) == (1, [0, 1, 2])
    assert rounds == [[f"{n} of {each}".encode() for each in world.numbers] for n in range(3)]


def test_a_regroup_ends_an_exchange_and_names_who_is_at_fault(driver: FakeDriver) -> None:
    def main(link: DriverLink, world: World) -> Any:
        if world.numbers[world.rank] == 2:
            driver.wait_for(lambda: len(driver._bodies.get((1, 0), {})) == 2)
            driver.give_up(2, "its cable was pulled")
            driver.wait_for(lambda: driver.over)
            return None
        with pytest.raises(HorovodInternalError, match="its cable was pulled") as caught:
            link.exchange(world).allgather(b"")
        return caught.value.rank == world.numbers.index(2) and link.over(1) is not None

    assert in_each_worker(driver, 3, main) == [True, True, None]


def test_what_is_late_from_an_old_world_is_ignored(driver: FakeDriver) -> None:
    driver.size = 1
    link = connect(driver, 0)
    link.wait_for_world()
    regrouped: list[int] = []
    link.on_regroup = lambda epoch, error: regrouped.append(epoch)
    driver.do(lambda: setattr(driver, "over", True))
    link.ready(1, 1)
    world = link.wait_for_world()
    assert isinstance(world, World)
    assert world.epoch == 2
    driver.silent_from = (2, 0)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(link.exchange(world).allgather(b"own")))
    waiting.start()
    driver.wait_for(lambda: (2, 0) in driver.pending_rounds())
    for late in (
        ["bodies", 1, 0, [b"an old world"]], ["bodies", 2, 7, [b"another round"]],
        ["regroup", 1, "an old world is over", 0],
        world_frame(1, [(0, "a")], 0, (), 0), ["regroup", 9, "a later world", 0],
    ):  # fmt: skip
        driver.send(0, *late)
    driver.send(0, "bodies", 2, 0, [b"own"])
    waiting.join(LIMIT)
    assert got == [[b"own"]]
    assert regrouped == []
    assert link.over(2) is None
    assert link.over(1) is not None
    link.close()


def test_a_newcomer_learns_its_place_and_waits_until_it_is_ready(driver: FakeDriver) -> None:
    driver.size, driver.admits = 1, False
    old = connect(driver, 5)
    assert isinstance(old.wait_for_world(), World)
    link = connect(driver, 8)
    assert link.wait_for_world() == Newcomer(1, ((5, "a"), (8, "a")))
    assert driver.epoch == 1
    driver.do(lambda: setattr(driver, "over", True))
    old.ready(1, 3)
    link.ready(0, 0)
    worlds = [old.wait_for_world(), link.wait_for_world()]
    assert worlds == [
        World(2, rank, ((5, "a"), (8, "a")), root=0, behind=(1,), commit=3) for rank in (0, 1)
    ]
    for each in (old, link):
        each.close()


@pytest.mark.parametrize("code", [0, 3])
def test_a_worker_that_is_not_needed_ends(
    driver: FakeDriver, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    link = connect(driver, 0)
    driver.wait_for(lambda: 0 in driver.living)
    driver.send(0, "end", code, "host a was removed")
    with pytest.raises(SystemExit) as caught:
        link.wait_for_world()
    assert caught.value.code == code
    assert capsys.readouterr().err == ("host a was removed\n" if code else "")
    link.close()


def test_the_end_of_the_driver_ends_all_waits(driver: FakeDriver) -> None:
    ended: list[int] = []

    def main(link: DriverLink, world: World) -> None:
        link.on_lost = ended.append
        if world.rank == 0:
            driver.wait_for(lambda: len(driver._bodies.get((1, 0), {})) == 1)
            driver.close()
        with pytest.raises(SystemExit) as caught:
            link.exchange(world).allgather(b"")
        assert caught.value.code == 1
        until(lambda: len(ended) == 2)

    in_each_worker(driver, 2, main)
    assert ended == [1, 1]


def test_a_worker_that_waits_says_so(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hvdlite.common.driver_link.link.LINE_SECONDS", 0.05)
    link = connect(driver, 4)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(link.wait_for_world()))
    thread.start()
    until(lambda: "worker 4 has waited" in caplog.text)
    assert "the next world of the job" in caplog.text
    driver.size = 1
    driver.do(lambda: None)
    thread.join(LIMIT)
    assert isinstance(got[0], World)
    link.close()


def test_hosts_that_are_seen_are_told_at_once(driver: FakeDriver) -> None:
    driver.size = 1
    link = connect(driver, 0)
    link.wait_for_world()
    seen: list[tuple[int, int]] = []
    link.on_seen = lambda counter, kind: seen.append((counter, kind))
    driver.send(0, "seen", 5, 2)
    until(lambda: seen == [(5, 2)])
    assert link.check() is None
    link.close()


def test_beats_come_without_the_script_and_are_not_told(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "BEAT_SECONDS", 0.02)
    link = connect(driver, 0)
    driver.wait_for(lambda: 0 in driver.living)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        assert driver.server.silence().get(0, 0) < 0.4
        time.sleep(0.01)
    assert [message[0] for _, message in driver.messages] == ["hello"]
    link.close()


def test_the_last_message_says_that_the_worker_is_done(driver: FakeDriver) -> None:
    links = [connect(driver, number) for number in range(2)]
    driver.wait_for(lambda: len(driver.living) == 2)
    links[0]._link._connection.shutdown(socket.SHUT_RDWR)  # As when its process was killed.
    links[1].close()
    driver.wait_for(lambda: driver.living == [])
    assert [number for number, message in driver.messages if message == ["bye"]] == [1]
    links[0].close()


# -- who may connect


def test_another_secret_is_refused(driver: FakeDriver) -> None:
    with pytest.raises(HorovodInternalError, match="HVDLITE_SECRET"):
        connect(driver, 0, "guessed")
    assert driver.messages == []


def test_a_second_process_of_a_worker_and_one_that_was_given_up_are_refused(
    driver: FakeDriver,
) -> None:
    link = connect(driver, 0)
    with pytest.raises(HorovodInternalError, match="worker 0 is connected already"):
        connect(driver, 0)
    driver.server._expects = lambda number: number != 1
    with pytest.raises(HorovodInternalError, match="worker 1 was given up"):
        connect(driver, 1)
    link.close()


def test_another_version_is_refused(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    new = prove.Claim.new
    other = Software(prove.OURS.protocol + 1, "9.9")
    monkeypatch.setattr(
        prove.Claim, "new", lambda party, body: new(party, body)._replace(software=other)
    )
    with pytest.raises(HorovodVersionMismatchError, match="protocol"):
        connect(driver, 0)


def test_a_driver_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "CONNECT_SECONDS", 0.2)
    with pytest.raises(HorovodInternalError, match="cannot reach the driver of the job at unix:"):
        DriverLink(f"unix:{tmp_path}/nobody", 0, b"")


@pytest.mark.parametrize(
    "attack",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        prove.MAGIC + os.urandom(prove.PROVEN_CLAIM_BYTES - len(prove.MAGIC)),
        struct.pack("<I", 1 << 30),
        b"",
    ],
    ids=["http", "no proof", "1 GB", "silence"],
)
def test_foreigners_do_not_disturb(driver: FakeDriver, attack: bytes) -> None:
    def main(link: DriverLink, world: World) -> list[bytes]:
        return link.exchange(world).allgather(b"%d" % world.rank)

    foreigner = socket.socket(socket.AF_UNIX)
    foreigner.connect(path_of(driver))
    foreigner.sendall(attack)
    assert in_each_worker(driver, 2, main) == [[b"0", b"1"]] * 2
    foreigner.settimeout(LIMIT)
    if attack:
        while foreigner.recv(1000):  # Until it is closed.
            pass
    foreigner.close()


@pytest.mark.parametrize(
    "message",
    [
        ["gather", 1, "0", b""],
        ["world", 1],
        ["checks", 1],
        ["hello", None],
        ["shutdown", 1],
        ["late", 1, [None]],
        ["error", 1, None],
    ],
    ids=str,
)
def test_a_worker_that_says_nonsense_is_lost(driver: FakeDriver, message: list[Any]) -> None:
    link = connect(driver, 0)
    driver.wait_for(lambda: 0 in driver.living)
    link._link.send(*message)
    driver.wait_for(lambda: 0 not in driver.living)
    link.close()


def test_a_link_leaves_nothing_behind(driver: FakeDriver) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    connect(driver, 0).close()
    driver.wait_for(lambda: driver.server.numbers() == [])
    before = descriptors(), threading.active_count()
    for number in range(1, 20):
        connect(driver, number).close()
    driver.wait_for(lambda: driver.living == [])
    until(lambda: (descriptors(), threading.active_count()) == before)
