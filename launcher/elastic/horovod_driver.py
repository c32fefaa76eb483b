"""A driver for tools written for Horovod, which start the workers of an elastic job by themselves.

The decisions are those of the launcher's own jobs, with Horovod's policies: a failed worker
excludes its host, and a commit waits for newcomers. One worker that returns 0 ends the job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlite.common.driver_link import frames
from hvdlite.common.meeting.placement import places
from hvdlite.common.settings.config import Config
from hvdlite.launcher.decisions import commands
from hvdlite.launcher.decisions.commands import WAIT, ElasticPlan
from hvdlite.launcher.decisions.driver import Driver
from hvdlite.launcher.elastic.horovod_types import (
    DiscoveredHosts,
    HostDiscovery,
    HostManager,
    Results,
    SlotInfo,
)

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0  # Read at each use.
ELASTIC_TIMEOUT_SECS = 600
TICK_SECONDS = 0.1

CreateWorker = Callable[[SlotInfo, list[threading.Event]], tuple[int, float]]

log = logging.getLogger("hvdlite")


@dataclass
class _ToolWorker:
    """A worker of the tool, which runs in a thread here."""

    start: commands.StartWorker
    info: SlotInfo
    end: threading.Event = field(default_factory=threading.Event)
    epoch: int = 0  # Of the last world that it was told.
    greeted: bool = False
    dropped: bool = False
    result: tuple[int, float] | None = None

    @property
    def name(self) -> str:
        """The key of its result."""
        return f"{self.start.host}[{self.start.slot}]"


class ElasticDriver:
    """Runs the workers that `create_worker_fn` of `start` makes, on the hosts of `discovery`.

    `rendezvous` has ``init(list of slots)``, called for each world, and ``stop()``. `timeout`
    limits each wait for slots, in seconds; None: HOROVOD_ELASTIC_TIMEOUT, or 600.
    """

    def __init__(
        self,
        rendezvous: Any,
        discovery: HostDiscovery,
        min_num_proc: int,
        max_num_proc: int | None,
        timeout: float | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[int, int] | None = None,
        verbose: int = 0,
    ) -> None:
        self._rendezvous = rendezvous
        if timeout is None:  # The setting of this process, or what tools may have set here.
            config = Config.from_environ()
            given = "elastic_timeout_seconds" in config.given
            timeout = config.elastic_timeout_seconds if given else ELASTIC_TIMEOUT_SECS
        self._plan = ElasticPlan(
            num_proc=min_num_proc, min_np=min_num_proc, max_np=max_num_proc,
            reset_limit=reset_limit, cooldown=cooldown_range,
            elastic_timeout=timeout, admit=WAIT, failures_by_host=True,
        )  # fmt: skip
        self._host_manager = HostManager(discovery, cooldown_range)
        # Guards all that follows, and tells of changes. Reentrant: a thread that starts a worker
        # may be one that ends another.
        self._changed = threading.Condition()
        self._driver: Driver | None = None
        self._create_worker: CreateWorker | None = None
        self._workers: dict[int, _ToolWorker] = {}
        self._members: Sequence[int] = ()
        self._shutdown = threading.Event()
        self._stopping = threading.Lock()  # Guards this alone.
        self._rendezvous_stopped = False
        self._error: str | None = None
        self._timestamp = 0
        self._thread = threading.Thread(target=self._watch, name="hvdlite-driver", daemon=True)
        self._thread.start()

    # -- the tool's side

    def start(self, num_proc: int, create_worker_fn: CreateWorker) -> None:
        """Start a worker in each slot as soon as there are `num_proc`."""
        self.wait_for_available_slots(num_proc)
        with self._changed:
            plan = vars(self._plan) | {"num_proc": num_proc}
            self._driver, self._create_worker = Driver(ElasticPlan(**plan)), create_worker_fn
            self._driver.discovered(self._host_manager.found, time.monotonic())
            self._carry_out()

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> DiscoveredHosts:
        """Return the hosts when they have so many slots. Raises RuntimeError if they never do."""
        deadline = time.monotonic() + self._plan.elastic_timeout
        with self._changed:
            while True:
                hosts = self._host_manager.current_hosts
                if self.finished():
                    raise RuntimeError(f"the job has ended: {self._error or 'it was stopped'}")
                slots = hosts.count_available_slots()
                if slots >= min_num_proc and len(hosts.available_hosts) >= min_hosts:
                    return hosts
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    self.stop(_missing(hosts, min_num_proc, min_hosts))

    def record_ready(self, host: str, slot: int) -> None:
        """Ask for the next world for a worker; return when it is decided, or none will be."""
        with self._changed:
            worker = self._find(host, slot)
            if worker is None or self._driver is None:
                return
            number, before = worker.start.number, worker.epoch
            now = time.monotonic()
            if not worker.greeted:
                worker.greeted = True
                self._driver.worker_said(number, [frames.HELLO, 0], now)
            if self._members:  # The world that runs has not waited for it.
                self._driver.worker_said(number, [frames.READY, before, before], now)
            self._carry_out()
            self._changed.wait_for(
                lambda: worker.epoch > before or worker.end.is_set() or self.finished()
            )

    def get_slot_info(self, host: str, slot: int) -> SlotInfo:
        """Return the place of a worker, or one of -1 where there is none."""
        with self._changed:
            worker = self._find(host, slot)
            return worker.info if worker is not None else SlotInfo(host)

    def get_coordinator_info(self) -> SlotInfo | None:
        """Return the place of rank 0, None before there is one."""
        with self._changed:
            infos = (worker.info for worker in self._assigned())
            return next((info for info in infos if info.rank == 0), None)

    def get_worker_client(self, slot_info: SlotInfo) -> Any:
        """Return what has ``notify_hosts_updated(timestamp, kind)`` for a worker, or None.

        A tool whose workers want to hear of hosts overrides this.
        """
        return None

    def get_results(self) -> Results:
        """Wait for the end of the job and of the rendezvous, and return how it has ended."""
        self._shutdown.wait()
        self._stop_rendezvous()
        with self._changed:
            self._changed.wait_for(lambda: all(each.result for each in self._workers.values()))
            assigned = [worker for worker in self._assigned() if worker.result]
            return Results(
                self._error, {each.name: each.result for each in assigned if each.result}
            )

    def resume(self) -> None:
        """Look at the hosts again."""
        with self._changed:
            self._carry_out()

    def stop(self, error_message: str | None = None) -> None:
        """End the job, and let all workers end."""
        with self._changed:
            if not self._shutdown.is_set():
                self._error = error_message
                self._shutdown.set()
                for worker in self._workers.values():
                    worker.end.set()
                self._changed.notify_all()

    def _stop_rendezvous(self) -> None:
        """Stop it once; not with the driver's lock, as it may wait for those who ask for places."""
        with self._stopping:
            if not self._rendezvous_stopped:
                self._rendezvous_stopped = True
                self._rendezvous.stop()

    def finished(self) -> bool:
        """Return whether the job has ended."""
        return self._shutdown.is_set()

    def world_size(self) -> int:
        """Return the number of ranks."""
        with self._changed:
            return len(self._assigned())

    def local_size(self, host: str) -> int:
        """Return the number of ranks of a host."""
        return len(self.host_assignments.get(host, []))

    @property
    def host_assignments(self) -> dict[str, list[SlotInfo]]:
        """The places of the ranks of each host."""
        result: dict[str, list[SlotInfo]] = {}
        with self._changed:
            for worker in self._assigned():
                result.setdefault(worker.start.host, []).append(worker.info)
        return result

    def _assigned(self) -> list[_ToolWorker]:
        """Return the ranks in their order; before the first world, the workers of the start."""
        if self._members:
            return [self._workers[number] for number in self._members]
        return [worker for worker in self._workers.values() if not worker.dropped]

    def _find(self, host: str, slot: int) -> _ToolWorker | None:
        workers = [each for each in self._workers.values() if not each.dropped]
        found = [each for each in workers if (each.start.host, each.start.slot) == (host, slot)]
        return found[-1] if found else None

    # -- discovery

    def _watch(self) -> None:
        """Discover again and again, and let time pass in between; end the job where that fails."""
        try:
            self._look_again_and_again()
        except Exception as error:
            log.exception("the elastic driver has failed")
            self.stop(f"the elastic driver has failed: {error!r}")
        self._stop_rendezvous()

    def _look_again_and_again(self) -> None:
        discover_at = time.monotonic()
        while not self.finished():
            if time.monotonic() >= discover_at:
                discover_at = time.monotonic() + DISCOVER_HOSTS_FREQUENCY_SECS
                self._discover()
            with self._changed:
                if self._driver is not None and not self.finished():
                    self._driver.tick(time.monotonic())
                    self._carry_out()
            self._shutdown.wait(min(TICK_SECONDS, max(0.0, discover_at - time.monotonic())))

    def _discover(self) -> None:
        try:
            kind = self._host_manager.update_available_hosts()
        except Exception as error:
            if self._timestamp:
                log.warning("discovery of hosts failed: %s", error)
            else:
                self.stop(f"the first discovery of hosts failed: {error}")
            return
        self._timestamp += 1
        with self._changed:
            if self._driver is not None and kind:
                self._driver.discovered(self._host_manager.found, time.monotonic())
                self._carry_out()
            self._changed.notify_all()
        coordinator = self.get_coordinator_info() if kind else None
        client = self.get_worker_client(coordinator) if coordinator is not None else None
        if client is not None:
            try:
                client.notify_hosts_updated(self._timestamp, kind)
            except Exception as error:  # It may have ended meanwhile.
                log.warning("a worker cannot hear that hosts have changed: %s", error)

    # -- what the decisions want

    def _carry_out(self) -> None:
        """Do what was decided. The caller holds the lock."""
        started = []
        while self._driver is not None and (orders := self._driver.take()):
            for command in orders:
                if isinstance(command, commands.StartWorker):
                    info = SlotInfo.of(command.host, command.place)
                    worker = self._workers[command.number] = _ToolWorker(command, info)
                    started.append(worker)
                else:
                    self._obey(self._driver, command)
        for worker in started:
            name = f"hvdlite-worker-{worker.start.number}"
            threading.Thread(target=self._run, args=[worker], name=name, daemon=True).start()
        self._changed.notify_all()

    def _obey(self, driver: Driver, command: commands.Command) -> None:
        match command:
            case commands.StartAgent(host):
                driver.agent_came(host, time.monotonic())
            case commands.DropAgent(host):
                for worker in self._workers.values():
                    if worker.start.host == host:
                        self._drop(worker)
            case commands.EndWorker(number):
                self._drop(self._workers[number])
            case commands.Tell(numbers, frame):
                for number in numbers:
                    self._tell(driver, number, frame)
            case commands.Say(line):
                log.info("%s", line)
            case commands.Finish(_, sentence):
                self.stop(sentence or None)

    def _drop(self, worker: _ToolWorker) -> None:
        worker.dropped = True
        worker.end.set()

    def _tell(self, driver: Driver, number: int, frame: list[Any]) -> None:
        worker = self._workers[number]
        match frame:
            case [frames.WORLD, int(epoch), members, *_]:
                hosts = [host for _, host in members]
                rank = [each for each, _ in members].index(number)
                worker.epoch = epoch
                worker.info = SlotInfo.of(worker.start.host, places(hosts)[rank])
                if rank == len(members) - 1:
                    self._members = [each for each, _ in members]
                    self._rendezvous.init([each.info for each in self._assigned()])
            case [frames.NOTICE, int(counter), _]:
                driver.worker_said(number, [frames.CHECKS, counter, 0], time.monotonic())
            case [frames.END, *_]:
                self._drop(worker)

    def _run(self, worker: _ToolWorker) -> None:
        assert self._create_worker is not None
        try:
            result = self._create_worker(worker.info, [self._shutdown, worker.end])
        except Exception as error:
            log.exception("worker %s failed", worker.name)
            result = 1, time.time()
            cause = str(error)
        else:
            cause = ""
        with self._changed:
            worker.result = result
            code = result[0]
            if not self.finished() and self._driver is not None:
                if code == 0 and not worker.dropped:
                    self.stop()
                else:
                    if not worker.dropped:
                        self._host_manager.blacklist(worker.start.host)
                    # Of one that was to end, too: another one may have its slot now.
                    self._driver.worker_ended(
                        worker.start.number, code, cause or None, False, time.monotonic()
                    )
                    worker.dropped = True
                    self._carry_out()
            self._changed.notify_all()


class RendezvousHandler:
    """Answers workers that ask for their places."""

    def __init__(self, driver: ElasticDriver) -> None:
        self._driver = driver

    def get_rank_and_size(self, host: str, slot: int) -> SlotInfo:
        """Return the place of a worker in the next world, once that is decided."""
        self._driver.record_ready(host, slot)
        return self._driver.get_slot_info(host, slot)


def create_rendezvous_handler(driver: ElasticDriver) -> RendezvousHandler:
    """Return what answers the workers of a driver."""
    return RendezvousHandler(driver)


def _missing(hosts: DiscoveredHosts, slots: int, host_count: int) -> str:
    there, hosts_there = hosts.count_available_slots(), len(hosts.available_hosts)
    if there < slots:
        return f"{slots - there} slots missing ({there} are there)"
    return f"{host_count - hosts_there} hosts missing ({hosts_there} are there)"
