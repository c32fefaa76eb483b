"""RayExecutor: functions on ranks that are actors of a Ray cluster, with Horovod's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from hvdlite.common.meeting.placement import new_secret, order_by_host, rank_variables
from hvdlite.launcher.elastic.direct_job import make_plan
from hvdlite.launcher.elastic.discovery import HostDiscovery
from hvdlite.missing_names import with_remedy
from hvdlite.ray.answers import collect
from hvdlite.ray.elastic_workers import ElasticWorkers
from hvdlite.ray.placement import Placement, Workers, place
from hvdlite.ray.worker import BaseHorovodWorker, Place

T = TypeVar("T")


@dataclass
class Settings:
    """What `RayExecutor.create_settings` returns; times are in seconds."""

    timeout_s: float = 30
    ssh_identity_file: str | None = None
    ssh_str: str | None = None
    placement_group_timeout_s: float = 100
    nics: Sequence[str] | None = None
    discovery: HostDiscovery | None = None  # Used by elastic jobs with override_discovery=False.

    def variables(self) -> dict[str, str]:
        """Return the settings of the ranks."""
        interfaces = {"HVDLITE_NETWORK_INTERFACES": ",".join(self.nics)} if self.nics else {}
        return {"HVDLITE_START_TIMEOUT": f"{self.timeout_s:g}", **interfaces}


class RayExecutor:
    """Runs functions on ranks of hvdlite, each an actor of Ray.

    `settings` come from `create_settings`. Give `num_workers`, or `num_hosts` and
    `num_workers_per_host`; the latter spreads them evenly over as many Ray nodes. Each worker
    takes `cpus_per_worker` and, with `use_gpu`, `gpus_per_worker` (1) of Ray's resources; it sees
    the GPUs of all workers of its host, and picks that of its local rank. With
    `use_current_placement_group`, `num_workers` run in the placement group that the caller runs
    in, where there is one. The workers live from `start` to `shutdown`.

    With `min_workers`, each call is an elastic job, whose function is to use ``hvd.elastic.run``:
    it starts as soon as there is room for so many workers, grows to `max_workers` (None: as far as
    there is room) as nodes come, and goes on when workers or nodes are lost. A host is an alive
    node of Ray, and has as many slots as workers fit into all of its resources; with
    ``override_discovery=False``, hosts and slots are what `settings.discovery` finds. At most
    `reset_limit` resets are allowed; `cooldown_range` is how long, in seconds, a host is left out
    after a failure, and `elastic_timeout` how long, in seconds, there may be too little room.

    Raises `ValueError` for arguments that contradict each other.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
    ) -> Settings:
        """Return settings: `timeout_s` for all ranks to meet in `init`, in seconds.

        `placement_group_timeout_s` is for Ray to find room for the workers; `nics` are the network
        interfaces that the ranks use. `ssh_identity_file` and `ssh_str` have no effect: no ssh is
        used between workers.
        """
        return Settings(timeout_s, ssh_identity_file, ssh_str, placement_group_timeout_s, nics)

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_worker is not None and not use_gpu:
            raise ValueError(f"gpus_per_worker={gpus_per_worker} needs use_gpu=True")
        if gpus_per_worker is not None and gpus_per_worker < 1:
            raise ValueError(f"gpus_per_worker={gpus_per_worker}: it must be at least 1")
        self.settings = settings or Settings()
        self.workers: list[Any] = []  # handles of the actors, in the order of their ranks
        self._use_current = use_current_placement_group
        if min_workers is None:
            _check_not_elastic(max_workers, reset_limit, cooldown_range)
        self._wanted = Workers(
            _count(num_workers, num_hosts, num_workers_per_host)
            if min_workers is None
            else min_workers,
            None if num_hosts is None else num_workers_per_host,
            cpus_per_worker,
            (gpus_per_worker or 1) if use_gpu else 0,
        )
        self._placement: Placement | None = None
        self._elastic: ElasticWorkers | None = None
        if min_workers is None:
            return
        if num_workers is not None or num_hosts is not None:
            raise ValueError(
                f"min_workers={min_workers} contradicts num_workers={num_workers} and "
                f"num_hosts={num_hosts}: an elastic job takes what room there is"
            )
        plan = make_plan(
            min_workers,
            max_workers,
            reset_limit=reset_limit,
            cooldown=cooldown_range,
            elastic_timeout=elastic_timeout,
        )
        if not override_discovery and self.settings.discovery is None:
            raise ValueError("override_discovery=False needs settings.discovery, to find the hosts")
        self._elastic = ElasticWorkers(
            plan,
            self._wanted,
            None if override_discovery else self.settings.discovery,
            self.settings.variables(),
            self.settings.placement_group_timeout_s,
        )

    @property
    def num_workers(self) -> int:
        """The number of ranks; the least of an elastic job."""
        return self._wanted.number

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers, and on each an object of `executable_cls` for `execute`.

        `extra_env_vars` are set in the workers before. The workers of an elastic job start with
        each call, and end with it. Raises `TimeoutError` where Ray has no room
        for them, and what `executable_cls` raises; nothing stays behind then.
        """
        if self.workers or (self._elastic is not None and self._elastic.started):
            raise RuntimeError("this RayExecutor has been started: call shutdown() before start()")
        try:
            import ray  # noqa: F401
        except ModuleNotFoundError as error:
            raise with_remedy(error, "ray", "pip install 'hvdlite[ray]'") from None
        args, kwargs = executable_args or (), executable_kwargs or {}
        if self._elastic is not None:
            self._elastic.start(executable_cls, args, kwargs, extra_env_vars or {})
            return
        try:
            self._start_workers(extra_env_vars or {})
            if executable_cls is not None:
                collect(
                    [w.start_executable.remote(executable_cls, args, kwargs) for w in self.workers]
                )
        except BaseException:
            self.shutdown()
            raise

    def _start_workers(self, extra_env_vars: Mapping[str, Any]) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        limit = self.settings.placement_group_timeout_s
        self._placement = place(self._wanted, self._use_current, limit)
        actor = ray.remote(BaseHorovodWorker)
        for bundle in self._placement.bundles:
            strategy = PlacementGroupSchedulingStrategy(
                self._placement.group, placement_group_bundle_index=bundle
            )
            options = actor.options(
                num_cpus=self._wanted.cpus,
                num_gpus=self._wanted.gpus,
                scheduling_strategy=strategy,
            )
            self.workers.append(options.remote())
        places = self._places(limit)
        order = order_by_host([place.host for place in places])
        self.workers = [self.workers[index] for index in order]
        self._tell_ranks([places[index] for index in order], extra_env_vars)

    def _places(self, limit: float) -> list[Place]:
        import ray

        asked = [worker.place.remote() for worker in self.workers]
        _, late = ray.wait(asked, num_returns=len(asked), timeout=limit)
        if late:
            raise TimeoutError(
                f"{len(late)} of {len(asked)} workers have not started in {limit:g} s: available "
                f"are {ray.available_resources()}, each worker takes {self._wanted.resources(1)}"
            )
        places: list[Place] = collect(asked)
        return places

    def _tell_ranks(self, places: Sequence[Place], extra_env_vars: Mapping[str, Any]) -> None:
        secret = new_secret()
        address = collect([self.workers[0].serve.remote(len(places), secret)])[0]
        ranks = rank_variables([place.host for place in places], address, secret)
        told = []
        for worker, me, variables in zip(self.workers, places, ranks, strict=True):
            gpus = [gpu for place in places if place.host == me.host for gpu in place.gpus]
            seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
            told.append(
                worker.update_env_vars.remote(
                    self.settings.variables() | seen | dict(extra_env_vars) | variables
                )
            )
        collect(told)

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[T]:
        """Run ``fn(*args, **kwargs)`` on all ranks; returns the results in rank order.

        Each of `callbacks` is called here with what rank 0 gives to `ray_logger.log`. An exception
        of a rank is raised here as Ray does, with the rank as a note; of several, it is one that
        is not merely a `HorovodInternalError` about another rank. Raises `HorovodInternalError`
        naming the rank whose actor has died. Other ranks may still be at work then: `shutdown`
        ends them.

        The results of an elastic job are those of all ranks of its last world. What ends it is
        raised: the exception of a worker, or `HorovodInternalError` that says why it cannot go on.
        No worker runs any more then.
        """
        if self._elastic is not None:
            call = partial(fn, *(args or ()), **(kwargs or {}))
            return self._elastic.run(lambda _: call(), callbacks or ())
        if not callbacks:
            return collect(self.run_remote(fn, args, kwargs))
        from ray.util.queue import Queue

        queue = Queue(actor_options={"num_cpus": 0})
        try:
            return collect(self._run(fn, args, kwargs, queue), queue, callbacks)
        finally:
            queue.shutdown(force=True)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Start ``fn(*args, **kwargs)`` on all ranks; returns Ray's references to the results.

        An elastic job has ended when this returns: how many results there are shows only then.
        """
        if self._elastic is not None:
            import ray

            return [ray.put(result) for result in self.run(fn, args, kwargs)]
        return self._run(fn, args, kwargs, None)

    def _run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        queue: Any,
    ) -> list[Any]:
        queues = [queue] + [None] * (self.num_workers - 1)
        return [
            worker.run.remote(fn, args or (), kwargs or {}, own)
            for worker, own in zip(self._started(), queues, strict=True)
        ]

    def execute(self, fn: Callable[[Any], T]) -> list[T]:
        """Run ``fn(executable)`` on all ranks; returns the results in rank order, as `run` does."""
        if self._elastic is not None:
            return self._elastic.run(fn)
        return collect([worker.execute.remote(fn) for worker in self._started()])

    def execute_single(self, fn: Callable[[Any], T]) -> T:
        """Return ``fn(executable)`` of rank 0. Raises `ValueError` where the job is elastic."""
        if self._elastic is not None:
            raise ValueError("execute_single: the ranks of an elastic job change; use execute()")
        answer: T = collect([self._started()[0].execute.remote(fn)])[0]
        return answer

    def _started(self) -> list[Any]:
        if not self.workers:
            raise RuntimeError("this RayExecutor has no workers: call start() before")
        return self.workers

    def shutdown(self) -> None:
        """End the workers, and give back what they took; `start` may be called again."""
        if self._elastic is not None:
            self._elastic.shutdown()
            return
        import ray

        workers, self.workers = self.workers, []
        placement, self._placement = self._placement, None
        for worker in workers:
            ray.kill(worker)
        if placement is not None and placement.own:
            ray.util.remove_placement_group(placement.group)


def _count(num_workers: int | None, num_hosts: int | None, per_host: int) -> int:
    if (num_workers is None) == (num_hosts is None):
        raise ValueError(
            f"num_workers={num_workers} and num_hosts={num_hosts}: give either num_workers, "
            "or num_hosts and num_workers_per_host; or min_workers for an elastic job"
        )
    count = num_workers if num_hosts is None else num_hosts * per_host
    if count is None or count < 1:
        raise ValueError(f"{count} workers: there must be at least one")
    return count


def _check_not_elastic(
    max_workers: int | None, reset_limit: int | None, cooldown_range: Sequence[int] | None
) -> None:
    given = {
        "max_workers": max_workers, "reset_limit": reset_limit, "cooldown_range": cooldown_range,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value} needs min_workers, which makes a job elastic")
