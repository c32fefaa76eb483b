"""The agreement on the check that is interrupted, under every order of events."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.driver_link.frames import World
from hvdlite.common.driver_link.link import DriverLink
from tests.elastic.fake_driver import SECRET, FakeDriver
from tests.ranks import run_threads

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[FakeDriver]:
    driver = FakeDriver(tmp_path, 2)
    yield driver
    driver.close()


def connect(driver: FakeDriver, number: int) -> DriverLink:
    link = DriverLink(driver.address, number, SECRET.encode())
    link.on_lost = lambda code: None  # A test that fails must not end the process.
    return link


def next_world(link: DriverLink) -> World:
    world = link.wait_for_world()
    assert isinstance(world, World)
    return world


@pytest.mark.parametrize("coupled", [False, True], ids=["free", "coupled by collectives"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_are_interrupted_in_the_same_check(
    driver: FakeDriver, size: int, coupled: bool
) -> None:
    """Notices come at any time, ranks are fast and slow; each round is a world of its own."""
    rounds, random_times = 25, random.Random(f"{size} {coupled}")
    driver.size = size
    meet = threading.Barrier(size)
    pauses = [[random_times.choice((0, 0, 1e-4, 1e-3)) for _ in range(97)] for _ in range(size)]

    def rank_main(number: int) -> list[tuple[int, int, int]]:
        link = connect(driver, number)
        interrupted = []
        for _ in range(rounds):
            world = next_world(link)
            if world.rank == 0:
                time.sleep(random_times.random() * 2e-3)
                driver.notice(1 + world.epoch % 3)
            for check in range(1, 1_000_000):
                kind = link.check()
                if kind is not None:
                    interrupted.append((world.epoch, check, kind))
                    break
                time.sleep(pauses[number][check % 97])
                if coupled:
                    meet.wait(20)
            link.ready(world.epoch, check)
        next_world(link)
        link.close()
        return interrupted

    results = run_threads(size, rank_main)
    assert results == [results[0]] * size
    assert [epoch for epoch, _, _ in results[0]] == list(range(1, rounds + 1))
    assert [kind for *_, kind in results[0]] == [1 + e % 3 for e in range(1, rounds + 1)]


def test_a_check_that_waits_ends_when_a_rank_is_lost(driver: FakeDriver) -> None:
    """Rank 1 stops to answer; the notice is never decided, but the world is over."""
    silent = threading.Event()

    def rank_main(number: int) -> str:
        link = connect(driver, number)
        world = next_world(link)
        if number == 1:
            link._checks.hold = lambda counter: time.sleep(1)  # type: ignore[method-assign]
            silent.set()
            driver.wait_for(lambda: driver.over)
            link.close()
            return ""
        assert silent.wait(30)
        driver.notice(1)
        driver.wait_for(lambda: any(message[0] == "checks" for _, message in driver.messages))
        threading.Timer(0.1, driver.give_up, [1, "it does not answer"]).start()
        with pytest.raises(HorovodInternalError) as caught:
            link.check()
        assert caught.value.rank == 1 - world.rank
        link.close()
        return str(caught.value)

    assert run_threads(2, rank_main)[0] == "worker 1 is lost: it does not answer"


def test_a_check_without_news_costs_microseconds_and_no_message(driver: FakeDriver) -> None:
    driver.size = 1
    link = connect(driver, 0)
    next_world(link)
    sent = len(driver.messages)
    times = []
    for _ in range(2000):
        began = time.perf_counter()
        assert link.check() is None
        times.append(time.perf_counter() - began)
    times.sort()
    assert times[len(times) // 2] < 50e-6
    assert len(driver.messages) == sent
    link.close()


def test_notices_of_a_world_do_not_hold_the_next_one(driver: FakeDriver) -> None:
    driver.size = 1
    link = connect(driver, 0)
    world = next_world(link)
    driver.send(0, "notice", 7, 1)
    driver.wait_for(lambda: (0, ["checks", 7, 0]) in driver.messages)
    driver.do(lambda: setattr(driver, "over", True))
    link.ready(world.epoch, 1)
    next_world(link)
    assert link.check() is None
    link.close()
