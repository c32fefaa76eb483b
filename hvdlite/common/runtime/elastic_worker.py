"""A worker of an elastic job: it goes from world to world over one link to the driver."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple, TypeVar

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.control_tree import neighbours
from hvdlite.common.engine.engine import Engine
from hvdlite.common.meeting import launch as launches
from hvdlite.common.membership.frames import Member, Newcomer, World
from hvdlite.common.membership.link import DriverLink
from hvdlite.common.plain.config import Config
from hvdlite.common.runtime.kept_sets import KeptSets
from hvdlite.common.runtime.recording import Lasting
from hvdlite.common.transport.base import Transport
from hvdlite.common.transport.inprocess import InProcessWorld, solo

T = TypeVar("T")
NOT_IN_A_WORLD = (
    "this worker has started while the others train, and they do not wait for it: collectives work "
    "from its first world on, which it joins in the function that hvd.elastic.run decorates. Move "
    "this call (a broadcast, a metric, a barrier) into that function or into a reset callback"
)

log = logging.getLogger("hvdlite")


class Connected(NamedTuple):
    """What a rank begins a world with: its connections, and the ranks of the process sets."""

    transport: Transport
    sets: list[tuple[int, ...]]


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
            offer = self._next_offer()
            try:
                return join(offer)
            except HorovodInternalError as error:
                if error.job_goes_on or not self.link.wait_until_over(self.epoch, patience_seconds):
                    raise
                log.info("world %d is over before it began: %s", self.epoch, error)

    def _next_offer(self) -> World | Newcomer:
        if self._says_hello:
            self._says_hello = False
        else:
            self.link.ready(self.epoch, self.commit)
        offer = self.link.wait_for_world()
        self.interrupted = False
        if isinstance(offer, World):
            self.world = offer
        return offer

    def follow(self, engine: Engine) -> None:
        """Abandon `engine` when the world of this worker is over; a newcomer is in none."""
        self._engine = engine
        if self.world is None:
            engine.abandon(HorovodInternalError(NOT_IN_A_WORLD))
            return
        engine.on_stall = partial(self._tell_late, self.world)
        over = self.link.over(self.epoch)
        if over is not None:
            engine.abandon(over)

    def _on_regroup(self, epoch: int, error: HorovodInternalError) -> None:
        engine = self._engine
        if engine is not None and epoch in (0, self.epoch):
            engine.abandon(error)

    def _tell_late(self, world: World, late: Sequence[int]) -> None:
        """Let the driver give up the ranks that are late; called on the engine thread of rank 0."""
        self.link.tell_late(world.epoch, [world.numbers[rank] for rank in late])

    def is_over(self) -> bool:
        """Return whether the driver has ended the world of this worker."""
        return self.link.over(self.epoch) is not None

    def check(self) -> int | None:
        """See `DriverLink.check`."""
        kind = self.link.check()
        if kind is not None:
            self.interrupted = True
        return kind

    # -- transports

    def connect(self, offer: World | Newcomer, config: Config) -> Connected:
        """Return the connections of a world; for a newcomer those of a world without others."""
        if isinstance(offer, Newcomer):
            return Connected(InProcessWorld(_topology(offer.members)).transport(offer.rank), [])
        if offer.size == 1:
            return Connected(solo(), self.sets.agree([self.sets.pack()], offer))
        return self._connect_over_tcp(offer, config)

    def _connect_over_tcp(self, world: World, config: Config) -> Connected:
        from hvdlite.common.transport.tcp.connect import Known
        from hvdlite.common.transport.tcp.connect import connect as connect_over_tcp

        sets: list[tuple[int, ...]] = []
        transport = connect_over_tcp(
            self.link.exchange(world),
            config,
            time.monotonic() + config.start_timeout_seconds,
            neighbours,
            host=world.host,
            secret=self._secret,
            epoch=world.epoch,
            interrupt=self.link,
            folder=self._folder(),
            known=Known(
                [host for _, host in world.members],
                self.sets.pack(),
                lambda told: sets.extend(self.sets.agree(told, world)),
            ),
        )
        return Connected(transport, sets)

    def _folder(self) -> str | None:
        """Return the folder of the agent, which removes it; None where it has none."""
        unix, colon, path = self._address.partition(":")
        return os.path.dirname(path) if (unix, colon) == ("unix", ":") else None


def _topology(members: tuple[Member, ...]) -> Topology:
    hosts: dict[str, list[int]] = {}
    for rank, (_, host) in enumerate(members):
        hosts.setdefault(host, []).append(rank)
    return Topology(tuple(tuple(ranks) for ranks in hosts.values()))
