"""The driver classes that tools written for Horovod use, by the laws that Horovod's tests state."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from hvdlite.common.base.host_update import HostUpdateResult
from hvdlite.launcher.elastic import horovod_driver, horovod_types
from hvdlite.launcher.elastic.horovod_driver import ElasticDriver, create_rendezvous_handler
from hvdlite.launcher.elastic.horovod_types import (
    RESET_LIMIT_EXCEEDED_MESSAGE,
    FixedHosts,
    HostDiscoveryScript,
    HostManager,
    SlotInfo,
)
from tests.launcher.jobs import executable
from tests.limits import HANG_SECONDS

pytestmark = pytest.mark.timeout(120)
MakeDriver = Callable[..., ElasticDriver]


@pytest.fixture
def make_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDriver]:
    monkeypatch.setattr(horovod_driver, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.01)
    drivers = []

    def make(hosts: Any, *numbers: int, **options: Any) -> ElasticDriver:
        discovery = FixedHosts(hosts) if isinstance(hosts, dict) else hosts
        drivers.append(ElasticDriver(MagicMock(), discovery, *numbers, **options))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.stop()
        driver._thread.join(10)
        assert not driver._thread.is_alive()


def wait_for_one(events: list[threading.Event]) -> None:
    deadline = time.monotonic() + 30
    while not any(event.wait(0.01) for event in events):
        assert time.monotonic() < deadline, "no event was set"


@pytest.mark.parametrize(
    ("variables", "timeout", "seconds"),
    [({}, None, 0.3), ({"HOROVOD_ELASTIC_TIMEOUT": "0.1"}, None, 0.1),
     ({"HVDLITE_ELASTIC_TIMEOUT": "0.2"}, None, 0.2),
     ({"HOROVOD_ELASTIC_TIMEOUT": "600"}, 0.1, 0.1)],
)  # fmt: skip
def test_the_variable_limits_the_wait_for_slots_where_no_timeout_is_given(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str],
    timeout: float | None, seconds: float,
) -> None:  # fmt: skip
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(horovod_driver, "ELASTIC_TIMEOUT_SECS", 600 if variables else 0.3)
    driver = make_driver({"host-1": 1}, 2, 2, timeout=timeout)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"1 slots missing \(1 are there\)"):
        driver.wait_for_available_slots(2)
    assert seconds <= time.monotonic() - begin < 60


def test_all_workers_return_zero(make_driver: MakeDriver) -> None:
    driver = make_driver({"host-1": 2}, 2, 4)
    driver.wait_for_available_slots(2)
    seen: dict[int, SlotInfo] = {}

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        driver.record_ready(slot.hostname, slot.local_rank)
        seen[slot.rank] = driver.get_slot_info(slot.hostname, slot.local_rank)
        return 0, time.time()

    driver.start(2, work)
    results = driver.get_results()
    assert results.error_message is None
    assert {name: code for name, (code, _) in results.worker_results.items()} == {
        "host-1[0]": 0,
        "host-1[1]": 0,
    }
    assert seen == {rank: SlotInfo("host-1", rank, rank, 0, 2, 2, 1) for rank in range(2)}
    assert driver.finished()
    rendezvous: Any = driver._rendezvous
    (infos,) = rendezvous.init.call_args[0]
    assert infos == [seen[0], seen[1]]
    rendezvous.stop.assert_called_once_with()


def test_a_host_whose_workers_fail_before_they_are_ready(make_driver: MakeDriver) -> None:
    driver = make_driver({"host-1": 2, "host-2": 2}, 2, 4)
    seen: dict[int, SlotInfo] = {}

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if slot.hostname == "host-1":
            if slot.rank == 1:
                driver.record_ready(slot.hostname, slot.local_rank)
            return 1, time.time()
        driver.record_ready(slot.hostname, slot.local_rank)
        seen[slot.rank] = driver.get_slot_info(slot.hostname, slot.local_rank)
        return 0, time.time()

    driver.start(4, work)
    results = driver.get_results().worker_results
    assert sorted(results) == ["host-2[0]", "host-2[1]"]
    assert seen == {rank: SlotInfo("host-2", rank - 2, rank - 2, 0, 2, 2, 1) for rank in (2, 3)}
    assert driver.world_size() == driver.local_size("host-2") == 2
    assert list(driver.host_assignments) == ["host-2"]
    assert driver.get_slot_info("host-1", 0).rank == -1


def test_one_worker_succeeds_while_the_others_wait(make_driver: MakeDriver) -> None:
    driver = make_driver({"host-1": 2, "host-2": 2}, 2, 4)

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if slot.rank == 0:
            return 0, time.time()
        wait_for_one(events)
        return 1, time.time()

    driver.start(4, work)
    results = driver.get_results().worker_results
    codes = {name: code for name, (code, _) in results.items()}
    assert codes == {"host-1[0]": 0, "host-1[1]": 1, "host-2[0]": 1, "host-2[1]": 1}


def test_a_failure_ends_the_other_workers_of_its_host(make_driver: MakeDriver) -> None:
    driver = make_driver({"host-1": 2, "host-2": 2}, 2, 4)

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if slot.rank == 0:
            return 1, time.time()
        if slot.hostname == "host-1":
            wait_for_one(events)
            return 1, time.time()
        driver.record_ready(slot.hostname, slot.local_rank)
        return 0, time.time()

    driver.start(4, work)
    results = driver.get_results()
    assert sorted(results.worker_results) == ["host-2[0]", "host-2[1]"]
    assert driver._host_manager.is_blacklisted("host-1")


def test_all_workers_fail(make_driver: MakeDriver) -> None:
    driver = make_driver({"host-1": 2, "host-2": 2}, 2, 4)
    driver.start(4, lambda slot, events: (3, time.time()))
    results = driver.get_results()
    assert results.error_message is not None
    assert "exit code 3" in results.error_message


def test_a_first_discovery_that_fails(make_driver: MakeDriver) -> None:
    discovery = MagicMock()
    discovery.find_available_hosts_and_slots.side_effect = RuntimeError("no scheduler")
    driver = make_driver(discovery, 2, 4)
    with pytest.raises(RuntimeError, match="no scheduler"):
        driver.wait_for_available_slots(2)
    assert driver.finished()


def test_enough_slots_on_too_few_hosts(make_driver: MakeDriver) -> None:
    hosts = FixedHosts({"host-1": 4})
    driver = make_driver(hosts, 2, 4)
    timer = threading.Timer(0.05, hosts.set, [{"host-1": 4, "host-2": 1}])
    timer.start()
    assert driver.wait_for_available_slots(2, min_hosts=2).count_available_slots() == 5
    timer.join()


def test_too_few_hosts(make_driver: MakeDriver) -> None:
    driver = make_driver({"host-1": 4}, 2, 4, timeout=0.2)
    with pytest.raises(RuntimeError, match=r"1 hosts missing \(1 are there\)"):
        driver.wait_for_available_slots(2, min_hosts=2)


def test_a_rendezvous_that_ends_by_waiting_for_those_who_ask(make_driver: MakeDriver) -> None:
    """A server joins the threads of its requests, and one of these waits for the next world."""
    driver = make_driver({"host-1": 2}, 2, 2)
    asked = threading.Event()

    def ask() -> None:
        asked.set()
        driver.record_ready("host-1", 0)

    request = threading.Thread(target=ask, daemon=True)
    ended: list[bool] = []

    def stop() -> None:
        request.join(10)
        ended.append(not request.is_alive())

    rendezvous: Any = driver._rendezvous
    rendezvous.stop.side_effect = stop

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if slot.rank == 1:
            request.start()
            assert asked.wait(10)
            return 0, time.time()
        wait_for_one(events)
        return 0, time.time()

    driver.start(2, work)
    assert driver.get_results().error_message is None
    assert ended == [True]


class Grower:
    """Workers that reset whenever their rank 0 is told of hosts, until `ranks` are there."""

    def __init__(self, make_driver: MakeDriver, hosts: FixedHosts, **options: Any) -> None:
        self.told: list[int] = []
        self.sizes: list[int] = []
        self.driver = make_driver(hosts, 2, 8, **options)
        client = MagicMock()
        client.notify_hosts_updated.side_effect = self.tell
        self.driver.get_worker_client = lambda info: client  # type: ignore[method-assign]

    def start(self) -> None:
        """Start two workers, and wait for their world."""
        self.driver.start(2, self.work)
        while not self.sizes:
            time.sleep(0.01)

    def tell(self, timestamp: int, kind: int) -> None:
        self.told.append(kind)

    def work(self, slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        where = slot.hostname, slot.local_rank
        for round_ in range(1 if slot.rank >= 2 else 0, 2):
            self.driver.record_ready(*where)
            info = self.driver.get_slot_info(*where)
            if info.rank == 0:
                self.sizes.append(info.size)
            while round_ == 0 and not self.told and not self.driver.finished():
                time.sleep(0.01)
        return 0, time.time()


def test_growth_is_told_to_rank_0_and_leads_to_a_larger_world(make_driver: MakeDriver) -> None:
    hosts = FixedHosts({"host-1": 2})
    job = Grower(make_driver, hosts)
    job.start()
    hosts.set({"host-1": 2, "host-2": 2})
    results = job.driver.get_results()
    assert results.error_message is None
    assert (job.sizes, job.told[:1]) == ([2, 4], [HostUpdateResult.added])


def test_a_worker_that_cannot_be_told_of_hosts_does_not_end_the_discovery(
    make_driver: MakeDriver,
) -> None:
    """It ends as hosts change: nobody looked for hosts any more, and no limit of time counted."""
    hosts = FixedHosts({"host-1": 2})
    job = Grower(make_driver, hosts)
    tell, refused = job.tell, threading.Event()

    def refuse_first(timestamp: int, kind: int) -> None:
        if not refused.is_set():
            refused.set()
            raise ConnectionRefusedError("the worker has ended")
        tell(timestamp, kind)

    client: Any = job.driver.get_worker_client(None)  # type: ignore[arg-type]
    client.notify_hosts_updated.side_effect = refuse_first
    job.start()
    hosts.set({"host-1": 2, "host-2": 1})
    assert refused.wait(10)
    hosts.set({"host-1": 2, "host-2": 2})
    assert job.driver.get_results().error_message is None
    assert job.sizes == [2, 4]


def test_what_fails_while_hosts_are_watched_ends_the_job_with_a_word(
    make_driver: MakeDriver,
) -> None:
    hosts = FixedHosts({"host-1": 2})
    job = Grower(make_driver, hosts)
    job.start()
    decisions: Any = job.driver._driver
    decisions.tick = MagicMock(side_effect=KeyError("a host"))
    message = job.driver.get_results().error_message
    assert message is not None and "the elastic driver has failed: KeyError('a host')" in message


def test_a_host_that_is_shown_again_is_used_again(make_driver: MakeDriver) -> None:
    """The worker that was told to end there has ended, and holds no slot any more."""
    hosts = FixedHosts({"host-1": 1, "host-2": 1})
    driver = make_driver(hosts, 1, 4)
    began: queue.Queue[str] = queue.Queue()
    ended = threading.Event()

    def reset(host: str) -> None:  # It waits for the next world.
        threading.Thread(target=driver.record_ready, args=(host, 0), daemon=True).start()

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        reset(slot.hostname)
        began.put(slot.hostname)
        wait_for_one(events)
        if slot.hostname == "host-2":
            ended.set()
        return 1, time.time()

    driver.start(2, work)
    assert {began.get(timeout=10), began.get(timeout=10)} == {"host-1", "host-2"}
    hosts.set({"host-1": 1})
    while "host-2" in driver._host_manager.found:
        time.sleep(0.01)
    reset("host-1")
    reset("host-2")
    assert ended.wait(10)
    hosts.set({"host-1": 1, "host-2": 1})
    while "host-2" not in driver._host_manager.found:
        time.sleep(0.01)
    reset("host-1")
    assert began.get(timeout=20) == "host-2"
    driver.stop()


def test_the_reset_limit_ends_the_job(make_driver: MakeDriver) -> None:
    hosts = FixedHosts({"host-1": 2})
    job = Grower(make_driver, hosts, reset_limit=0)
    job.start()
    hosts.set({"host-1": 2, "host-2": 2})
    message = job.driver.get_results().error_message
    assert message is not None
    assert RESET_LIMIT_EXCEEDED_MESSAGE.format(0) in message


def test_nobody_is_told_while_nothing_is_assigned(make_driver: MakeDriver) -> None:
    hosts = FixedHosts({"host-1": 1})
    job = Grower(make_driver, hosts)
    hosts.set({"host-1": 2})
    job.driver.wait_for_available_slots(2)
    hosts.set({"host-1": 1})
    while job.driver._host_manager.current_hosts.count_available_slots() != 1:
        time.sleep(0.01)
    assert job.told == []


def test_a_rendezvous_handler_answers_with_the_place(make_driver: MakeDriver) -> None:
    driver = make_driver({"host-1": 1}, 1, 1)
    handler = create_rendezvous_handler(driver)
    places = []

    def work(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        places.append(handler.get_rank_and_size("host-1", 0))
        return 0, time.time()

    driver.start(1, work)
    driver.get_results()
    assert places == [SlotInfo("host-1", 0, 0, 0, 1, 1, 1)]


# -- hosts


def test_host_manager() -> None:
    hosts = FixedHosts({})
    manager = HostManager(hosts)
    kinds = []
    for found in ({"x": 1}, {"x": 1, "y": 3}, {"y": 3}, {"y": 2, "z": 1}, {"y": 2, "z": 1}):
        hosts.set(found)
        kinds.append(int(manager.update_available_hosts()))
    assert kinds == [2, 2, 1, 3, 0]
    before = manager.current_hosts
    hosts.set({"z": 5, "w": 1, "y": 1})
    assert before.host_slots == {"y": 2, "z": 1}
    manager.update_available_hosts()
    manager.blacklist("z")
    assert (before.available_hosts, before.host_assignment_order) == ({"y", "z"}, ["y", "z"])
    assert (before.get_slots("z"), before.count_available_slots()) == (1, 3)
    now = manager.current_hosts
    assert (now.host_assignment_order, now.get_slots("z")) == (["y", "w"], 0)
    assert manager.is_blacklisted("z")
    assert HostManager.order_available_hosts({"t", "s", "q"}, ["p", "q", "r", "s"]) == [*"qst"]


def test_a_host_that_has_cooled_down_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    manager = HostManager(FixedHosts({"a": 2}), cooldown_range=(1, 2))
    manager.update_available_hosts()
    manager.blacklist("a")
    assert manager.update_available_hosts() == HostUpdateResult.no_update
    clock[0] += 2
    assert manager.update_available_hosts() == HostUpdateResult.added
    assert manager.current_hosts.get_slots("a") == 2


def test_host_discovery_script(tmp_path: Path) -> None:
    script = executable(tmp_path / "my hosts.sh", "echo host-2\necho\necho host-1:3")
    found = HostDiscoveryScript(str(script), 4).find_available_hosts_and_slots()
    assert list(found.items()) == [("host-2", 4), ("host-1", 3)]
    assert HostDiscoveryScript("echo a; echo b").find_available_hosts_and_slots() == {
        "a": 1,
        "b": 1,
    }
    executable(script, "exit 3")
    with pytest.raises(RuntimeError, match="exit code 3"):
        HostDiscoveryScript(str(script), 4).find_available_hosts_and_slots()
    with pytest.raises(ValueError, match="line 1: '<html>'"):
        HostDiscoveryScript("echo '<html>'").find_available_hosts_and_slots()


def test_a_host_discovery_script_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horovod_types, "SCRIPT_SECONDS", 0.3)
    child = tmp_path / "child"
    script = HostDiscoveryScript(f"sleep 1000 & echo $! > {child}; wait")
    while not child.exists() or not child.read_text():  # Slow to start: killed before.
        with pytest.raises(RuntimeError, match="has not ended within"):
            script.find_available_hosts_and_slots()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{child.read_text().strip()}/exe"):
        assert time.monotonic() < deadline


def test_names_of_horovod() -> None:
    code = (
        "from hvdlite import as_horovod; as_horovod.install()\n"
        "from horovod.runner.elastic.driver import (ElasticDriver, ELASTIC_TIMEOUT_SECS,\n"
        "    DISCOVER_HOSTS_FREQUENCY_SECS)\n"
        "from horovod.runner.elastic import constants, discovery, settings\n"
        "from horovod.runner.elastic.rendezvous import create_rendezvous_handler\n"
        "from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationManager\n"
        "import horovod.runner.elastic.registration\n"
        "import hvdlite.launcher.elastic.horovod_driver as own\n"
        "assert ElasticDriver is own.ElasticDriver and ELASTIC_TIMEOUT_SECS == 600\n"
        "assert settings.ElasticSettings(1, 2, 3, 4, 5, verbose=1).verbose == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
