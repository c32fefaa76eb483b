"""Where agents and workers are started, and which workers are not needed any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdlite.common.driver_link import frames
from hvdlite.common.meeting.placement import places
from hvdlite.launcher.decisions.commands import (
    Command,
    DropAgent,
    ElasticPlan,
    EndWorker,
    StartAgent,
    StartWorker,
    Tell,
)
from hvdlite.launcher.decisions.failures import FOREVER, Failures
from hvdlite.launcher.decisions.hosts import AgentStage, Hosts, order_hosts
from hvdlite.launcher.decisions.workers import Stage, Worker, Workers

# How long a worker that was told to end may take, until SIGTERM and until SIGKILL.
TERMINATE_SECONDS = 10.0
KILL_SECONDS = 15.0


@dataclass(frozen=True)
class Parts:
    """What the classes share by which a driver decides; `order` adds a command."""

    plan: ElasticPlan
    hosts: Hosts
    workers: Workers
    failures: Failures
    order: Callable[[Command], None]


@dataclass(frozen=True)
class Vacancy:
    """A slot that should have a worker, from the time `start_at` on.

    The time is `FOREVER` while the process of a worker that was given up has not ended: both would
    need the memory of the same GPU.
    """

    host: str
    slot: int
    start_at: float


class Placement:
    """Gives each usable slot a worker, up to the most that the job may have."""

    def __init__(self, parts: Parts) -> None:
        self._plan, self._hosts, self._workers = parts.plan, parts.hosts, parts.workers
        self._failures, self._order = parts.failures, parts.order
        self._assigned: Sequence[str] = ()  # The hosts of the last world, each once.
        self._ranks: dict[int, int] = {}  # Of the last world, by the numbers of its workers.

    # -- who may stay

    def hosts_in_order(self, now: float) -> list[str]:
        """Return the usable hosts: those with ranks of the last world first, in its order."""
        usable = self._hosts.usable(now)
        return self._in_order(usable, self._last_holders(self._divide(usable)[0], now))

    def _in_order(self, usable: Iterable[str], last_holders: Iterable[Worker]) -> list[str]:
        living = {worker.host for worker in self._workers.living() if worker.number in self._ranks}
        # A newcomer must not be rank 0 because all ranks of the first host have died.
        assigned = sorted(self._assigned, key=lambda host: host not in living)
        return order_hosts(assigned, [*usable, *(each.host for each in last_holders)])

    def unwanted(self, now: float) -> list[Worker]:
        """Return the living workers that have to leave.

        Their slots have gone, then they are the last ones of their hosts; or there are more than
        the job may have, because hosts have come back, then they are the last newcomers. The last
        holders of the state stay until another rank has it.
        """
        staying, gone = self._divide(self._hosts.usable(now))
        return self._unwanted(staying, gone, self._last_holders(staying, now))

    def _unwanted(
        self, staying: list[Worker], gone: list[Worker], last_holders: Sequence[Worker]
    ) -> list[Worker]:
        result = gone
        if len(staying) > self._most():
            newest_last = sorted(
                staying, key=lambda each: (each.number not in self._ranks, each.number)
            )
            result = gone + newest_last[self._most() :]
        return [each for each in result if each not in last_holders]

    def last_holders(self, now: float) -> list[Worker]:
        """Return the ranks whose slots have gone and which stay, as nobody else has the state.

        They stay while a host is shown on which a successor may come.
        """
        return self._last_holders(self._divide(self._hosts.usable(now))[0], now)

    def _last_holders(self, staying: Iterable[Worker], now: float) -> list[Worker]:
        if any(each.number in self._ranks for each in staying):
            return []
        if not self._hosts.may_take_over(now):
            return []
        return [each for each in self._workers.living() if each.number in self._ranks]

    def _divide(self, usable: Mapping[str, int]) -> tuple[list[Worker], list[Worker]]:
        """Return the living workers that have slots, and those whose slots have gone."""
        staying: list[Worker] = []
        gone: list[Worker] = []
        for host, living in self._workers.by_host():
            slots = usable.get(host, 0)
            workers = living if len(living) <= slots else self.in_order(host)
            staying += workers[:slots]
            gone += workers[slots:]
        return staying, gone

    def in_order(self, host: str) -> list[Worker]:
        """Return the living workers of a host: its ranks in their order, then the newcomers."""
        living = [worker for worker in self._workers.on(host) if worker.living]
        new = len(self._ranks)
        return sorted(living, key=lambda each: (self._ranks.get(each.number, new), each.number))

    def note_world(self, members: Sequence[int], hosts: Sequence[str]) -> None:
        """Take the workers of a new world and their hosts, in rank order."""
        self._ranks = {number: rank for rank, number in enumerate(members)}
        self._assigned = list(dict.fromkeys(hosts))

    def in_expected_order(self, now: float) -> list[Worker]:
        """Return the living workers that may stay, in the order of their ranks in a next world."""
        unwanted = {each.number for each in self.unwanted(now)}
        workers = [each for host in self.hosts_in_order(now) for each in self.in_order(host)]
        return [each for each in workers if each.number not in unwanted]

    def in_next_world(self, now: float) -> list[Worker]:
        """Return the workers of the next world in rank order: those that are ready and may stay.

        Where the state is to be handed over, one rank that has it comes before its successors, or
        more of them where these are too few for a world.
        """
        ready = [each for each in self.in_expected_order(now) if each.ready]
        holders = [each for each in self.last_holders(now) if each in ready]
        successors = [each for each in ready if each not in holders]
        if not holders or not successors:
            return self._with_last_commit(ready, now)
        holders.sort(key=lambda each: (-each.commit, self._ranks[each.number]))
        stay = holders[: max(1, self._plan.min_np - len(successors))]
        stay.sort(key=lambda each: self._ranks[each.number])
        return [*stay, *successors][: max(1 + len(stay), self._most())]

    def _with_last_commit(self, chosen: list[Worker], now: float) -> list[Worker]:
        """Return the chosen workers and, where none of them has the last commit, one that does.

        That is a rank that has to leave, and committed before it heard of a loss. It leaves at the
        commit after that.
        """
        last = max((each.commit for each in chosen), default=0)
        ranks = [each for each in self.unwanted(now) if each.number in self._ranks]
        ahead = [each for each in ranks if each.ready and each.commit > last]
        if not chosen or not ahead:
            return chosen
        newest = max(ahead, key=lambda each: (each.commit, -self._ranks[each.number]))
        own = self._ranks[newest.number]
        before = [
            index for index, each in enumerate(chosen, 1) if self._ranks.get(each.number, own) < own
        ]
        at, most = before[-1] if before else 0, max(2, self._most()) - 1
        # Nobody may come between the ranks of a host: they have one place in a world.
        while (
            0 < at < len(chosen)
            and chosen[at].host == chosen[at - 1].host
            and chosen[at].number not in self._ranks
        ):
            at += 1
        at = min(at, most)
        return [*chosen[:at], newest, *chosen[at:most]]

    # -- who is missing

    def vacancies(self, now: float) -> list[Vacancy]:
        """Return the slots that should have a worker and have none, in the order of hosts."""
        usable = self._hosts.usable(now)
        holders = [each for each in self._workers if each.holds_slot]
        held = {(each.host, each.slot) for each in holders}
        used = Counter(host for host, _ in held)
        if all(used[host] >= slots for host, slots in usable.items()):
            return []
        staying, gone = self._divide(usable)
        last_holders = self._last_holders(staying, now)
        unwanted = {worker.number for worker in self._unwanted(staying, gone, last_holders)}
        unwanted |= {worker.number for worker in last_holders}
        room = self._most() - sum(each.number not in unwanted for each in holders)
        result = []
        for host in order_hosts(self._in_order(usable, last_holders), usable):
            free = [slot for slot in range(usable[host]) if (host, slot) not in held]
            ending = {each.slot for each in self._workers.on(host) if each.ending}
            # A worker beyond the slots of its host holds one of them until it has ended.
            for slot in free[: max(0, usable[host] - used[host])]:
                if room > 0:
                    start_at = self._failures.retry_time(host, slot, now)
                    result.append(Vacancy(host, slot, FOREVER if slot in ending else start_at))
                    room -= 1
        return result

    def _most(self) -> int:
        return self._plan.max_np if self._plan.max_np is not None else 2**31

    def planned_hosts(self, now: float) -> dict[str, int]:
        """Return how many workers each host has, or should have: the assignment."""
        unwanted = {worker.number for worker in self.unwanted(now)}
        living = self._workers.living()
        hosts = Counter(each.host for each in living if each.number not in unwanted)
        hosts.update(each.host for each in self.vacancies(now))
        return {host: hosts[host] for host in self.hosts_in_order(now) if host in hosts}

    # -- orders

    def fill(self, now: float) -> None:
        """Start the agents and the workers that are missing."""
        due = [each for each in self.vacancies(now) if each.start_at <= now]
        starts = []
        for vacancy in due:
            agent = self._hosts.agent(vacancy.host)
            if agent.stage is AgentStage.ABSENT:
                self._hosts.start(vacancy.host)
                self._order(StartAgent(vacancy.host))
            elif agent.stage is AgentStage.UP:
                starts.append(vacancy)
        if starts:
            expected = self._expected(now)
            all_places = places([host for host, _ in expected])
            free = self._free_ranks(expected)
            ranks = {slot: rank for rank, slot in enumerate(expected)}
            for vacancy in starts:
                host, slot = vacancy.host, vacancy.slot
                own = ranks[host, slot]
                rank = own if own in free else next(iter(free))
                del free[rank]
                place = {**all_places[own], "RANK": rank}
                if slot < place["LOCAL_SIZE"]:
                    place["LOCAL_RANK"] = slot  # A lost worker had the same GPU.
                worker = self._workers.start(host, slot, rank, self._failures.failed(host, slot))
                self._order(StartWorker(worker.number, host, slot, rank, place))

    def _free_ranks(self, expected: Sequence[tuple[str, int]]) -> dict[int, None]:
        """Return the ranks of newcomers that no newcomer has been told yet, in their order.

        After one of several losses, a newcomer may have been told the rank that another one is
        expected to have now.
        """
        living = {(each.host, each.slot): each for each in self._workers.living()}
        present = [living.get(place) for place in expected]
        told = {each.start_rank for each in present if each and each.number not in self._ranks}
        return {
            rank: None
            for rank, worker in enumerate(present)
            if rank not in told and (worker is None or worker.number not in self._ranks)
        }

    def _expected(self, now: float) -> list[tuple[str, int]]:
        """Return host and slot of each rank of a world in which all slots have workers."""
        unwanted = {worker.number for worker in self.unwanted(now)}
        vacant: dict[str, list[int]] = {}
        for vacancy in self.vacancies(now):
            vacant.setdefault(vacancy.host, []).append(vacancy.slot)
        result = []
        for host in self.hosts_in_order(now):
            staying = [each for each in self.in_order(host) if each.number not in unwanted]
            result += [(host, each.slot) for each in staying]
            result += [(host, slot) for slot in vacant.get(host, ())]
        return result

    def dismiss(self, worker: Worker, sentence: str, now: float) -> None:
        """Tell a worker that it is not needed any more: how it ends does not matter."""
        worker.stage = Stage.LEAVING
        if worker.greeted:
            self._order(Tell((worker.number,), [frames.END, 0, sentence]))
            worker.terminate_at, worker.kill_at = now + TERMINATE_SECONDS, now + KILL_SECONDS
        else:
            self._order(EndWorker(worker.number, kill=False))
            worker.kill_at = now + KILL_SECONDS - TERMINATE_SECONDS

    def give_up(self, worker: Worker, sentence: str) -> None:
        """Kill a worker that may never answer; `sentence` tells it why, if it is quick."""
        if worker.greeted:
            self._order(Tell((worker.number,), [frames.END, 1, sentence]))
        self._order(EndWorker(worker.number, kill=True))

    def drop_host(self, host: str, now: float) -> None:
        """End the agent of a host, and all workers there; who prints a traceback may end it."""
        if any(each.unwinding for each in self._workers.on(host)):
            for worker in self._workers.on(host):
                if worker.running and not worker.unwinding:
                    self._order(EndWorker(worker.number, kill=True))
            return  # `end_late_ones` ends the agent after the last worker.
        if self._hosts.agent(host).stage is not AgentStage.ABSENT:
            self._order(DropAgent(host))
            self._hosts.end(host, now)
        for worker in self._workers.on(host):
            worker.running = False

    def end_late_ones(self, now: float) -> None:
        """End what was told to end and has not, and the agents of hosts that are not used."""
        for worker in self._workers:
            if not worker.running:
                continue
            if worker.kill_at is not None and now >= worker.kill_at:
                worker.kill_at = worker.terminate_at = None
                self._order(EndWorker(worker.number, kill=True))
            elif worker.terminate_at is not None and now >= worker.terminate_at:
                worker.terminate_at = None
                self._order(EndWorker(worker.number, kill=False))
        self._workers.forget_past()
        usable = self._hosts.usable(now)
        for host in self._hosts.with_agents():
            if host not in usable and not any(each.running for each in self._workers.on(host)):
                self.drop_host(host, now)

    def next_time(self, now: float) -> float | None:
        """Return when a worker may start, or has had its time to end."""
        times = [each.start_at for each in self.vacancies(now) if now < each.start_at < FOREVER]
        for worker in self._workers:
            if worker.running:
                times += filter(None, (worker.terminate_at, worker.kill_at))
        return min(times, default=None)
