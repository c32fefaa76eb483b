"""RayExecutor: functions on ranks that are actors of a Ray cluster, with Horovod's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from hvdlite.launcher.elastic.direct_job import make_plan
from hvdlite.launcher.elastic.horovod_types import HostDiscovery
from hvdlite.missing_names import with_remedy
from hvdlite.ray.elastic_workers import ElasticWorkers, RayHostDiscovery
from hvdlite.ray.fixed_workers import FixedWorkers, Workers

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
        self._workers: FixedWorkers | ElasticWorkers
        variables, limit = self.settings.variables(), self.settings.placement_group_timeout_s
        if min_workers is None:
            self._workers = FixedWorkers(
                self._wanted, use_current_placement_group, variables, limit
            )
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
        discovery = self.settings.discovery
        if override_discovery:
            discovery = RayHostDiscovery(use_gpu, cpus_per_worker, gpus_per_worker)
        elif discovery is None:
            raise ValueError("override_discovery=False needs settings.discovery, to find the hosts")
        self._workers = ElasticWorkers(plan, self._wanted, discovery, variables, limit)

    @property
    def workers(self) -> list[Any]:
        """Handles of the actors, in the order of their ranks; none outside of elastic calls."""
        return self._workers.actors if isinstance(self._workers, FixedWorkers) else []

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
        if self._workers.started:
            raise RuntimeError("this RayExecutor has been started: call shutdown() before start()")
        try:
            import ray  # noqa: F401
        except ModuleNotFoundError as error:
            raise with_remedy(error, "ray", "pip install 'hvdlite[ray]'") from None
        args, kwargs = executable_args or (), executable_kwargs or {}
        self._workers.start(executable_cls, args, kwargs, extra_env_vars or {})

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
        return self._workers.run(_call(fn, args, kwargs), callbacks or ())

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Start ``fn(*args, **kwargs)`` on all ranks; returns Ray's references to the results.

        An elastic job has ended when this returns: how many results there are shows only then.
        """
        return self._workers.run_remote(_call(fn, args, kwargs))

    def execute(self, fn: Callable[[Any], T]) -> list[T]:
        """Run ``fn(executable)`` on all ranks; returns the results in rank order, as `run` does."""
        return self._workers.run(fn)

    def execute_single(self, fn: Callable[[Any], T]) -> T:
        """Return ``fn(executable)`` of rank 0. Raises `ValueError` where the job is elastic."""
        answer: T = self._workers.run_single(fn)
        return answer

    def shutdown(self) -> None:
        """End the workers, and give back what they took; `start` may be called again."""
        self._workers.shutdown()


def _call(
    fn: Callable[..., T], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], T]:
    """Return the call of `fn` as a function of the executable, which it does not get."""
    call = partial(fn, *(args or ()), **(kwargs or {}))
    return lambda _: call()


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
