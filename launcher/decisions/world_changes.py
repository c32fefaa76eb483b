"""One world after another: when a world is over, what the next one waits for, and who is in it."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.common.base.host_update import HostUpdateResult, compare_hosts
from hvdlite.common.driver_link import frames
from hvdlite.launcher.decisions import lines
from hvdlite.launcher.decisions.commands import WAIT, Say, Tell
from hvdlite.launcher.decisions.merged_meeting import MergedMeeting
from hvdlite.launcher.decisions.placement import Parts, Placement
from hvdlite.launcher.decisions.workers import (
    CheckAgreement,
    Reset,
    Stage,
    Worker,
    World,
    keep_order,
    make_world,
)

# How long newcomers that are ready wait for others that have been started.
GATHER_SECONDS = 1.0
# How long a rank that has left its world is not told to the others: who was lost is known then.
BROKEN_SECONDS = 0.05
# The same for a rank that may have left an older world.
OLDER_SECONDS = 1.0


class WorldChanges:
    """The world that runs, and the reset that leads to the next one, if there is any."""

    def __init__(self, parts: Parts, placement: Placement) -> None:
        self._workers, self._placement = parts.workers, placement
        self._failures, self._order = parts.failures, parts.order
        self.world: World | None = None
        self.member_set: frozenset[int] = frozenset()  # The members of the world.
        self.reset: Reset | None = None
        self.resets = 0  # All but those by which replacements of failed workers are taken in.
        self.committed = 0  # The highest number of a commit that a worker has told.
        self.line: list[int] = []  # The ranks, with those that have returned at their places.
        self._rounds = MergedMeeting(0)
        self._counter = 0
        self._error = ""  # The first one by which a rank has left the world while it was whole.

    # -- who is who

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the ranks, in their order."""
        return self.world.members if self.world else ()

    def living_members(self) -> list[Worker]:
        """Return the ranks that live, in their order."""
        return self._workers.living(self.members)

    def newcomers(self) -> list[Worker]:
        """Return the living workers that are no ranks."""
        members = self.member_set
        return [each for each in self._workers.living() if each.number not in members]

    def kept(self) -> list[Worker]:
        """Return the workers that have returned, and whose results count."""
        ever = self._workers.ever()
        return [each for each in ever if each.stage is Stage.RETURNED and each.counts]

    # -- what workers say

    def hello(self, worker: Worker, now: float) -> None:
        """Take in a worker, or tell it that the running world does not wait for it."""
        worker.greeted = True
        if self.world is None:
            worker.ready = True
            return
        hosts = self._placement.in_expected_order(now)
        members = [[each.number, each.host] for each in hosts]
        rank = hosts.index(worker) if worker in hosts else 0
        self._order(Tell((worker.number,), [frames.NEWCOMER, rank, members or [[0, worker.host]]]))

    def ready(self, worker: Worker, epoch: int, commit: int, now: float) -> None:
        """Note that a worker wants the next world, and which commit it holds."""
        worker.ready = True
        worker.commit = commit if worker.epoch else 0
        if worker.number not in self.member_set or self.world is None:
            return
        if commit > self.committed:
            self.committed = commit
            self._failures.progressed(epoch)
            # A first commit may have come before a rank heard that another one had failed at once.
            if epoch == self.world.epoch and commit > self.world.commit + 1:
                members = [self._workers[each] for each in self.members]
                self._failures.took_part(epoch, [(each.host, each.slot) for each in members])
        if self.reset is not None and self.reset.complete:
            if not self.reset.interrupted:
                self.reset.interrupted = True
                if not self.reset.losses:
                    self.reset.since = now
            return
        if self.reset is None:
            self.reset = Reset(now)
            self.resets += 1
        wait = BROKEN_SECONDS if epoch == self.world.epoch else OLDER_SECONDS
        if self.reset.regroup_at is None:
            self.reset.regroup_at = now + wait
        if epoch == self.world.epoch:
            self.reset.left.add(worker.number)
        if all(each.number in self.reset.left for each in self.living_members()):
            self.reset.regroup_at = now  # Nobody was lost, and nobody is left to be told.

    def note_error(self, worker: Worker, epoch: int, text: str) -> None:
        """Note by which error of its script a rank leaves the world, which is whole."""
        if self.world is not None and self.world.epoch == epoch and not self._error:
            self._error = f"{lines.name(worker, self.world)} raised {text}"

    def error(self) -> str:
        """Return by which error the world broke, where no rank was lost and none has returned."""
        reset = self.reset
        if not self._error or reset is None or not reset.regrouped or reset.losses:
            return ""
        if any(self._workers[number].stage is Stage.RETURNED for number in self.members):
            return ""
        return f"no rank was lost, but {self._error}"

    def gather(self, worker: Worker, epoch: int, round_: int, body: bytes) -> None:
        """Take a rank's part of a round of the world's meeting."""
        over = self.reset is not None and self.reset.regrouped
        if self.world is None or epoch != self.world.epoch or over:
            return
        if worker.number in self.member_set:
            bodies = self._rounds.add(self.members, round_, {worker.number: body})
            if bodies is not None:
                self._order(Tell(self.members, [frames.BODIES, epoch, round_, bodies]))

    def checks(self, worker: Worker, counter: int, passed: int) -> None:
        if self.reset is not None and self.reset.agreement is not None:
            self.reset.agreement.answer(worker.number, counter, passed)
            self._raise_if_agreed(self.reset)

    # -- the end of a world

    def lose(self, worker: Worker, now: float) -> None:
        """End the world of a rank that was lost."""
        if self.reset is None:
            self.reset = Reset(now)
            self.resets += 1
        if not self.reset.losses and not self.reset.interrupted:
            self.reset.since = min(self.reset.since, now)
        self.reset.losses.append(worker)
        assert self.world is not None  # The worker is one of its ranks.
        self._regroup(self.reset, lines.lost([worker], self.world), self.world.rank(worker.number))

    def leave_out(self, worker: Worker) -> None:
        """Do not wait for the check of a rank that has returned."""
        if self.reset is not None and self.reset.agreement is not None:
            self.reset.agreement.leave_out(worker.number)
            self._raise_if_agreed(self.reset)

    def _regroup(self, reset: Reset, sentence: str, rank: int | None) -> None:
        assert self.world is not None
        if reset.regrouped:
            return
        reset.regrouped, reset.agreement, reset.regroup_at = True, None, None
        numbers = tuple(each.number for each in self.living_members() if not each.ready)
        if numbers:
            self._order(Tell(numbers, [frames.REGROUP, self.world.epoch, sentence, rank]))

    def regroup_if_broken(self, now: float) -> None:
        """Tell the others of a rank that has left the world, if nobody was lost meanwhile."""
        reset = self.reset
        if reset is None or reset.regroup_at is None or now < reset.regroup_at:
            return
        left = [each for each in self.living_members() if each.ready]
        if self.world is not None and left:
            sentence = f"{lines.name(left[0], self.world)} has left the world: it lost a peer"
            self._regroup(reset, sentence, None)

    def tell_seen(self, kind: HostUpdateResult) -> None:
        numbers = tuple(each.number for each in self.living_members())
        if numbers:
            self._counter += 1
            self._order(Tell(numbers, [frames.SEEN, self._counter, int(kind)]))

    def interrupt(self, kind: HostUpdateResult, now: float) -> None:
        """Let the ranks agree on the check that raises in all of them."""
        numbers = tuple(each.number for each in self.living_members())
        self._counter += 1
        agreement = CheckAgreement(self._counter, numbers)
        self.reset = Reset(now, agreement, int(kind))
        self._order(Tell(numbers, [frames.NOTICE, self._counter, int(kind)]))

    def _raise_if_agreed(self, reset: Reset) -> None:
        if reset.agreement is None or reset.agreement.check is None:
            return
        if reset.regroup_at is not None:  # A rank has undone its work, so the others must, too.
            return
        frame = [frames.RAISE, reset.agreement.counter, reset.agreement.check, reset.kind]
        reset.agreement, reset.raised = None, True
        numbers = tuple(each.number for each in self.living_members())
        if numbers:
            self._order(Tell(numbers, frame))

    # -- the next world

    def publish(self, chosen: Sequence[Worker], leaving: Sequence[Worker], now: float) -> None:
        """Make the chosen workers the next world, in their order. Raises `NoStateError`.

        Those that are `leaving` were removed.
        """
        old, reset = self.world, self.reset
        world = make_world(old.epoch + 1 if old else 1, chosen, self.committed)
        kept = [each.number for each in self.kept()]
        self.line = keep_order(self.line or kept, kept, world.members)
        self.world, self.reset, self._error = world, None, ""
        self.member_set = frozenset(world.members)
        self._rounds = MergedMeeting(len(world.members))
        self._placement.note_world(world.members, world.hosts)
        for worker in chosen:
            worker.ready, worker.epoch = False, world.epoch
        members = zip(world.members, world.hosts, strict=True)
        frame = frames.world_frame(world.epoch, members, world.root, world.behind, world.commit)
        self._order(Tell(world.members, frame))
        if old is None or reset is None:
            self._order(Say(lines.first_world(world)))
        else:
            seconds = now - reset.since
            gone = [each for each in leaving if each.number in old.members]
            done = [each for each in self.kept() if each.number in old.members]
            cause = lines.cause(old, reset, gone, done)
            line = lines.next_world(old, world, cause, seconds, redone=reset.regrouped)
            self._order(Say(line))

    def results(self) -> tuple[int, ...]:
        """Return the workers that have returned, in rank order of the last world."""
        kept = {each.number for each in self.kept()}
        if self.world is None:
            order = sorted(kept, key=lambda number: self._workers[number].start_rank)
            return tuple(order)
        return tuple(number for number in self.line if number in kept)


# What ranks are told when hosts come and go, and when this leads to another world.


class HostChanges:
    """The changes of hosts since the last world."""

    def __init__(self, parts: Parts, placement: Placement, worlds: WorldChanges) -> None:
        self._plan, self._workers = parts.plan, parts.workers
        self._placement, self._worlds = placement, worlds
        self._planned: dict[str, int] = {}  # The assignment that the ranks know of.
        self._awaited = False  # Hosts were added, and all ranks are to wait for their workers.
        self._ready_since: float | None = None  # When the first newcomer was ready.

    def tell(self, now: float) -> None:
        """Tell the ranks when the assignment changes because of hosts, and not of failures."""
        if not self._worlds.members or self._worlds.reset is not None:
            return
        planned = self._placement.planned_hosts(now)
        kind = compare_hosts(self._planned, planned)
        if kind:
            self._planned = planned
            self._awaited |= bool(kind & HostUpdateResult.added)
            self._worlds.tell_seen(kind)

    def note_world(self, now: float) -> None:
        self._awaited, self._ready_since = False, None
        self._planned = self._placement.planned_hosts(now)

    def wanted(self, now: float) -> HostUpdateResult:
        """Return how the next world would differ, if it is time to stop at a commit for it."""
        kind = HostUpdateResult.no_update
        if self._worlds.world is None or self._worlds.reset is not None:
            return kind
        if self._placement.unwanted(now):
            kind |= HostUpdateResult.removed
        if self._growth_due(now):
            kind |= HostUpdateResult.added
        return kind

    def counts(self, kind: HostUpdateResult) -> bool:
        """Return whether a reset for this counts.

        What takes the place of a failed worker belongs to the reset after the failure.
        """
        fresh = [each for each in self._worlds.newcomers() if not each.replaces]
        return bool(kind & HostUpdateResult.removed or fresh or self._awaited)

    def _growth_due(self, now: float) -> bool:
        """Return whether newcomers are to be taken in now. A job that ends takes in nobody."""
        members = self._worlds.members
        if any(self._workers[number].stage is Stage.RETURNED for number in members):
            return False
        newcomers = self._worlds.newcomers()
        if self._awaited and self._plan.admit == WAIT:
            return bool(newcomers or self._placement.vacancies(now))
        if not any(each.ready for each in newcomers):
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        all_ready = all(each.ready for each in newcomers)
        return all_ready or now >= self._ready_since + GATHER_SECONDS

    def next_time(self) -> float | None:
        """Return until when newcomers that are ready wait for others."""
        return None if self._ready_since is None else self._ready_since + GATHER_SECONDS
