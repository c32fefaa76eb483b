"""A worker of an elastic job: it goes from world to world over one link to the driver."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgpack

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.control_tree import neighbours
from hvdlite.common.driver_link.frames import Newcomer, World
from hvdlite.common.driver_link.link import DriverLink
from hvdlite.common.meeting import launch as launches
from hvdlite.common.requests.process_set_table import GLOBAL_ID
from hvdlite.common.runtime.connect import Connected
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.recording import Lasting
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.inprocess import InProcessWorld, solo

if TYPE_CHECKING:
    from hvdlite.common.engine.engine import Engine

# The process sets that a worker of an elastic job keeps from world to world.
#
# A set is made of workers, not of ranks: in the next world it has the ranks of those members that
# live on, and a set without any is gone. Ranks number the sets anew, in their old order and the
# same way on all of them, also on newcomers. A set that only some survivors know is dropped: the
# world broke while it was added or removed.

# What stands for a set on all ranks: INIT and its position in the argument of `init`; or the epoch
# and the id with which it was added, and its workers.
Key = tuple[int, ...]
INIT = 0  # No world has this epoch.


class KeptSet(NamedTuple):
    """One set, by the numbers of its workers."""

    key: Key
    numbers: tuple[int, ...]


class KeptSets:
    """The sets of one worker."""

    def __init__(self) -> None:
        # Whether this worker has been in a world, so that it knows all sets.
        self._knows = False
        self._sets: list[KeptSet] = []
        self._objects: dict[Key, ProcessSet] = {}
        # The sets of the world that begins, in the order of their ids.
        self._agreed: list[KeptSet] = []
        # Whether that world follows another one, from which all sets are; `init` makes none then.
        self.follows = False

    def note_init(self, sets: Iterable[ProcessSet]) -> None:
        """Note the argument of the first `init`: newcomers know these sets by their positions."""
        self._objects = {(INIT, position): each for position, each in enumerate(sets)}

    def note_world(
        self, world: World, ranks: Mapping[int, Sequence[int]], objects: Mapping[int, ProcessSet]
    ) -> None:
        """Note the sets of a world before it ends: ranks and objects by process set id."""
        by_position = {id(each): key for key, each in self._objects.items()}
        agreed = dict(enumerate(self._agreed, GLOBAL_ID + 1))
        first = not self._knows
        self._sets, self._objects, self._knows = [], {}, True
        for process_set_id, members in ranks.items():
            if process_set_id == GLOBAL_ID:
                continue
            numbers = tuple(world.numbers[rank] for rank in members)
            process_set, same = objects.get(process_set_id), agreed.get(process_set_id)
            key: Key = (world.epoch, process_set_id, *numbers)
            if same is not None and same.numbers == numbers:
                key = same.key
            elif first:
                key = by_position.get(id(process_set), key)
            self._sets.append(KeptSet(key, numbers))
            if process_set is not None:
                self._objects[key] = process_set

    def pack(self) -> bytes:
        """Return what this worker tells the others when they meet."""
        body: bytes = msgpack.packb([self._knows, self._sets])
        return body

    def agree(self, bodies: Sequence[bytes], world: World) -> list[tuple[int, ...]]:
        """Return the ranks of all sets in the order of their ids, from what all workers tell."""
        told = [msgpack.unpackb(body) for body in bodies]
        known = [[KeptSet(*map(tuple, each)) for each in sets] for knows, sets in told if knows]
        common = set.intersection(*({each.key for each in sets} for sets in known)) if known else ()
        self._agreed, self.follows = [], bool(known)
        for key, numbers in known[0] if known else ():
            left = tuple(each for each in world.numbers if each in numbers)
            if key in common and left:
                self._agreed.append(KeptSet(key, left))
        rank_of = {number: rank for rank, number in enumerate(world.numbers)}
        return [tuple(rank_of[each] for each in numbers) for _, numbers in self._agreed]

    def bind(self, ranks: Mapping[int, Sequence[int]]) -> dict[int, ProcessSet]:
        """Give the objects of this worker their new ids and ranks; return the objects by id.

        Objects of sets that are gone have no members, and cannot be used.
        """
        bound: dict[int, ProcessSet] = {}
        for process_set_id, (key, _) in enumerate(self._agreed, GLOBAL_ID + 1):
            process_set = self._objects.get(key)
            if process_set is not None:
                process_set._bind(process_set_id, ranks[process_set_id])
                bound[process_set_id] = process_set
        kept = {id(each) for each in bound.values()}
        for process_set in self._objects.values():
            if self.follows and id(process_set) not in kept:
                process_set._vanish()
        return bound


T = TypeVar("T")
NOT_IN_A_WORLD = (
    "this worker has started while the others train, and they do not wait for it: collectives work "
    "from its first world on, which it joins in the function that hvd.elastic.run decorates. Move "
    "this call (a broadcast, a metric, a barrier) into that function or into a reset callback"
)

log = logging.getLogger("hvdlite")


class ElasticWorker:
    """The link of this worker, and the world that it is in."""

    def __init__(self, lasting: Lasting, environ: Mapping[str, str] = os.environ) -> None:
        self.lasting = lasting
        self.number = int(environ[launches.WORKER])
        self._address = environ[launches.DRIVER]
        self._secret = environ.get("HVDLITE_SECRET", "").encode()
        # None before the first world: the worker is a newcomer and waits.
        self.world: World | None = None
        # The number of the commit that this worker holds; 0: none.
        self.commit = 0
        self.sets = KeptSets()
        # Whether a check has interrupted this world: its ranks leave it in order.
        self.interrupted = False
        # The engine of the last world; set while that world may be over at any time.
        self._engine: Engine | None = None
        # Whether the driver has yet to answer the hello.
        self._says_hello = True
        self.link = DriverLink(self._address, self.number, self._secret)
        self.link.on_regroup = self._on_regroup
        import_module("hvdlite.common.transport.tcp.connect")  # The others must not wait for it.

    @property
    def epoch(self) -> int:
        """The epoch of the last world that was given to this worker; 0 before the first."""
        return 0 if self.world is None else self.world.epoch

    # -- from world to world

    def enter(self, join: Callable[[World | Newcomer], T], patience_seconds: float) -> T:
        """Return ``join(world)`` of the next world that comes about.

        A world may lose a rank while its ranks meet, and another one follows. `join` raises
        `HorovodInternalError` then, and the driver knows of it within `patience_seconds`; any other
        error of `join` is raised here. Raises `SystemExit` where this worker is not needed.
        """
        while True:
            if self._says_hello:
                self._says_hello = False
            else:
                self.link.ready(self.epoch, self.commit)
            offer = self.link.wait_for_world()
            self.interrupted = False
            if isinstance(offer, World):
                self.world = offer
            try:
                return join(offer)
            except HorovodInternalError as error:
                if error.job_goes_on or not self.link.wait_until_over(self.epoch, patience_seconds):
                    raise
                log.info("world %d is over before it began: %s", self.epoch, error)

    def follow(self, engine: Engine) -> None:
        """Abandon `engine` when the world of this worker is over; a newcomer is in none."""
        self._engine, world = engine, self.world
        if world is None:
            engine.abandon(HorovodInternalError(NOT_IN_A_WORLD))
            return
        # The driver may give up the ranks that are late.
        engine.on_stall = lambda late: self.link.tell_late(
            world.epoch, [world.numbers[rank] for rank in late]
        )
        over = self.link.over(self.epoch)
        if over is not None:
            engine.abandon(over)

    def _on_regroup(self, epoch: int, error: HorovodInternalError) -> None:
        engine = self._engine
        if engine is not None and epoch in (0, self.epoch):
            engine.abandon(error)

    def is_over(self) -> bool:
        """Return whether the driver has ended the world of this worker."""
        return self.link.over(self.epoch) is not None

    def check(self) -> int | None:
        kind = self.link.check()
        if kind is not None:
            self.interrupted = True
        return kind

    # -- transports

    def connect(self, offer: World | Newcomer, config: Config) -> Connected:
        """Return the connections of a world; for a newcomer those of a world without others."""
        if isinstance(offer, Newcomer):
            hosts: dict[str, list[int]] = {}
            for rank, (_, host) in enumerate(offer.members):
                hosts.setdefault(host, []).append(rank)
            topology = Topology(tuple(map(tuple, hosts.values())))
            return Connected(InProcessWorld(topology).transport(offer.rank))
        if offer.size == 1:
            return Connected(solo(), sets=self.sets.agree([self.sets.pack()], offer))
        return self._connect_over_tcp(offer, config)

    def _connect_over_tcp(self, world: World, config: Config) -> Connected:
        from hvdlite.common.transport.tcp.connect import Known
        from hvdlite.common.transport.tcp.connect import connect as connect_over_tcp

        sets: list[tuple[int, ...]] = []
        unix, colon, path = self._address.partition(":")
        transport = connect_over_tcp(
            self.link.exchange(world),
            config,
            time.monotonic() + config.start_timeout_seconds,
            neighbours,
            host=world.host,
            secret=self._secret,
            epoch=world.epoch,
            interrupt=self.link,
            # That of the agent, which removes it, where there is one.
            folder=os.path.dirname(path) if (unix, colon) == ("unix", ":") else None,
            known=Known(
                [host for _, host in world.members],
                self.sets.pack(),
                lambda told: sets.extend(self.sets.agree(told, world)),
            ),
        )
        return Connected(transport, sets=sets)
