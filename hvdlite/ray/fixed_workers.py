"""The workers of a `RayExecutor` that keeps its ranks: actors that live from `start` to `shutdown`.

Also what elastic ones share with them: what a worker takes, and what rank 0 logs meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.meeting.placement import new_secret, order_by_host, rank_variables
from hvdlite.launcher.processes.error_text import shorten
from hvdlite.ray.worker import BaseHorovodWorker, Place

LOOK_SECONDS = 0.1  # how often the driver looks for what rank 0 has logged
# Ranks that only tell of another one's failure wait so long for that one to tell its own.
CAUSE_SECONDS = 0.5
NOT_STARTED = "this RayExecutor has no workers: call start() before"
Callbacks = Sequence[Callable[[Any], Any]]


class Workers(NamedTuple):
    """How many workers there are, and what each of them takes."""

    number: int
    per_host: int | None  # None: Ray places them, as closely together as it can
    cpus: float
    gpus: float

    def bundles(self) -> tuple[list[dict[str, float]], str]:
        """Return the bundles of a placement group of their own, and its strategy."""
        if self.per_host is None:
            return [self.resources(1)] * self.number, "PACK"
        return [self.resources(self.per_host)] * (self.number // self.per_host), "STRICT_SPREAD"

    def resources(self, workers: int) -> dict[str, float]:
        """Return what some workers take together."""
        wanted = {"CPU": self.cpus * workers, "GPU": self.gpus * workers}
        return {name: number for name, number in wanted.items() if number}

    def fit_into(self, bundle: dict[str, float]) -> int:
        """Return how many workers a bundle has room for."""
        wanted = self.resources(1)
        rooms = (bundle.get(name, 0) // number for name, number in wanted.items())
        return int(min(rooms, default=self.number))

    def start_actor(self, strategy: Any) -> Any:
        """Start one worker where `strategy` of Ray's says."""
        import ray

        actor = ray.remote(BaseHorovodWorker)
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        return actor.options(scheduling_strategy=strategy, **options).remote()


class Placement(NamedTuple):
    """A placement group, and the bundle of each worker (-1: any that has room)."""

    group: Any
    bundles: list[int]
    own: bool  # it was made for these workers, and goes with them


def place(workers: Workers, use_current: bool, timeout_seconds: float) -> Placement:
    """Return the placement of `workers`: in the group that the caller runs in, or in a new one.

    Raises `ValueError` where the current group has too little room, and `TimeoutError` where the
    cluster has not made room for a new one in time.
    """
    import ray

    current = ray.util.get_current_placement_group() if use_current else None
    if current is not None and workers.per_host is None:
        room = sum(workers.fit_into(bundle) for bundle in current.bundle_specs)
        if room < workers.number:
            raise ValueError(
                f"the current placement group has room for {room} workers of "
                f"{workers.resources(1)}, and num_workers is {workers.number}: its bundles are "
                f"{current.bundle_specs}; give it more, or use_current_placement_group=False"
            )
        return Placement(current, [-1] * workers.number, own=False)
    bundles, strategy = workers.bundles()
    group = ray.util.placement_group(bundles, strategy=strategy)
    done, _ = ray.wait([group.ready()], timeout=timeout_seconds)
    if not done:
        ray.util.remove_placement_group(group)
        raise TimeoutError(
            f"Ray has found no room for {workers.number} workers in {timeout_seconds:g} s: the "
            f"placement group asks for {bundles} ({strategy}), available are "
            f"{ray.available_resources()}, in all {ray.cluster_resources()}; ask for fewer "
            "workers, or raise placement_group_timeout_s where the cluster is still growing"
        )
    per_bundle = workers.per_host or 1
    return Placement(group, [index // per_bundle for index in range(workers.number)], own=True)


class FixedWorkers:
    """Workers that take `wanted` each, with `variables`; Ray must find room in `limit_seconds`."""

    def __init__(
        self, wanted: Workers, use_current: bool, variables: Mapping[str, str],
        limit_seconds: float,
    ) -> None:  # fmt: skip
        self.actors: list[Any] = []  # In the order of their ranks.
        self._wanted, self._use_current = wanted, use_current
        self._variables, self._limit_seconds = variables, limit_seconds
        self._placement: Placement | None = None

    @property
    def started(self) -> bool:
        """Whether `start` was called, and `shutdown` was not."""
        return bool(self.actors)

    def start(
        self, executable_cls: type | None, args: Sequence[Any], kwargs: Mapping[str, Any],
        extra_env_vars: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Start the workers, and on each an object of `executable_cls`; all, or none."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        try:
            self._placement = place(self._wanted, self._use_current, self._limit_seconds)
            for bundle in self._placement.bundles:
                strategy = PlacementGroupSchedulingStrategy(
                    self._placement.group, placement_group_bundle_index=bundle
                )
                self.actors.append(self._wanted.start_actor(strategy))
            places = self._places()
            order = order_by_host([place.host for place in places])
            self.actors = [self.actors[index] for index in order]
            self._tell_ranks([places[index] for index in order], extra_env_vars)
            if executable_cls is not None:
                collect([
                    actor.start_executable.remote(executable_cls, args, kwargs)
                    for actor in self.actors
                ])  # fmt: skip
        except BaseException:
            self.shutdown()
            raise

    def _places(self) -> list[Place]:
        import ray

        asked = [actor.place.remote() for actor in self.actors]
        _, late = ray.wait(asked, num_returns=len(asked), timeout=self._limit_seconds)
        if late:
            raise TimeoutError(
                f"{len(late)} of {len(asked)} workers have not started in "
                f"{self._limit_seconds:g} s: available are {ray.available_resources()}, each "
                f"worker takes {self._wanted.resources(1)}"
            )
        places: list[Place] = collect(asked)
        return places

    def _tell_ranks(self, places: Sequence[Place], extra_env_vars: Mapping[str, Any]) -> None:
        secret = new_secret()
        address = collect([self.actors[0].serve.remote(len(places), secret)])[0]
        ranks = rank_variables([place.host for place in places], address, secret)
        told = []
        for actor, me, variables in zip(self.actors, places, ranks, strict=True):
            gpus = [gpu for place in places if place.host == me.host for gpu in place.gpus]
            seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
            told.append(
                actor.update_env_vars.remote(
                    {**self._variables, **seen, **extra_env_vars, **variables}
                )
            )
        collect(told)

    def run(self, function: Callable[[Any], Any], callbacks: Callbacks = ()) -> list[Any]:
        """Run ``function(executable)`` on all ranks; return the results in rank order."""
        with log_queue(callbacks) as queue:
            return collect(self.run_remote(function, queue), queue, callbacks)

    def run_remote(self, function: Callable[[Any], Any], queue: Any = None) -> list[Any]:
        """Return Ray's references to the results, which may still be awaited."""
        self._check_started()
        queues = [queue] + [None] * (len(self.actors) - 1)
        return [
            actor.execute.remote(function, own)
            for actor, own in zip(self.actors, queues, strict=True)
        ]

    def run_single(self, function: Callable[[Any], Any]) -> Any:
        """Return ``function(executable)`` of rank 0."""
        self._check_started()
        return collect([self.actors[0].execute.remote(function)])[0]

    def _check_started(self) -> None:
        if not self.actors:
            raise RuntimeError(NOT_STARTED)

    def shutdown(self) -> None:
        """End the workers, and give back what they took."""
        import ray

        actors, self.actors = self.actors, []
        placement, self._placement = self._placement, None
        for actor in actors:
            ray.kill(actor)
        if placement is not None and placement.own:
            ray.util.remove_placement_group(placement.group)


@contextmanager
def log_queue(callbacks: Callbacks) -> Iterator[Any]:
    """Yield the queue for what rank 0 logs to `callbacks`; None where there are none."""
    if not callbacks:
        yield None
        return
    from ray.util.queue import Queue

    queue = Queue(actor_options={"num_cpus": 0})
    try:
        yield queue
    finally:
        queue.shutdown(force=True)


def collect(
    references: Sequence[Any], queue: Any = None, callbacks: Sequence[Callable[[Any], Any]] = ()
) -> list[Any]:
    """Return the results of `references`, one a rank; raises what `RayExecutor.run` does."""
    import ray

    ranks = {reference: rank for rank, reference in enumerate(references)}
    waiting = list(references)
    victims: dict[int, BaseException] = {}
    give_up = float("inf")
    while waiting and time.monotonic() < give_up:
        limit = LOOK_SECONDS if callbacks or victims else None
        done, waiting = ray.wait(waiting, timeout=limit)
        call_back(queue, callbacks)
        for reference in done:
            error = _failure(reference, ranks[reference])
            if error is None:
                continue
            if not isinstance(error, HorovodInternalError) or isinstance(
                error.__cause__, ray.exceptions.RayActorError
            ):
                raise error
            victims[ranks[reference]] = error
            give_up = min(give_up, time.monotonic() + CAUSE_SECONDS)
    if victims:
        raise victims[min(victims)]
    call_back(queue, callbacks)
    return list(ray.get(list(references)))


def _failure(reference: Any, rank: int) -> BaseException | None:
    """Return the exception of a rank that has ended, or None."""
    import ray

    try:
        ray.get(reference)
    except ray.exceptions.RayActorError as error:
        reason = shorten(str(error).strip().rpartition("\n")[2])
        lost = HorovodInternalError(f"rank {rank} is lost, its Ray actor has died: {reason}", rank)
        lost.__cause__ = error
        return lost
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"(raised on rank {rank})")
        return error
    return None


def call_back(queue: Any, callbacks: Sequence[Callable[[Any], Any]]) -> None:
    """Call `callbacks` with what rank 0 has logged since."""
    while callbacks and (number := queue.qsize()):
        for logged in queue.get_nowait_batch(number):
            for callback in callbacks:
                callback(logged)
