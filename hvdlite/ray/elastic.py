"""ElasticRayExecutor: Horovod's first API for elastic jobs on Ray, which it has deprecated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hvdlite.common.base.warn import warn_user
from hvdlite.ray.elastic_workers import RayHostDiscovery
from hvdlite.ray.runner import RayExecutor, Settings

__all__ = ["ElasticRayExecutor", "ElasticSettings", "RayHostDiscovery"]

T = TypeVar("T")


@dataclass
class ElasticSettings(Settings):
    """What `ElasticRayExecutor.create_settings` returns; times are in seconds."""

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[int] | None = None
    elastic_timeout: float = 600


class ElasticRayExecutor:
    """Runs functions as elastic jobs on Ray; use `RayExecutor` with `min_workers` instead.

    `settings` come from `create_settings`. `env_vars` are set in the workers. Raises `ValueError`
    for arguments that contradict each other.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """Return settings: from `min_num_proc` to `max_num_proc` workers, None for as many as fit.

        `elastic_timeout` is how long, in seconds, there may be too few slots. `kwargs` are further
        fields of `ElasticSettings`. `ssh_identity_file` has no effect.
        """
        return ElasticSettings(
            timeout_s=timeout_s,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            min_num_proc=min_num_proc,
            max_num_proc=max_num_proc,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            **kwargs,
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        warn_user("ElasticRayExecutor is deprecated: use RayExecutor(min_workers=...)")
        if gpus_per_slot is not None and not use_gpu:
            raise ValueError(f"gpus_per_slot={gpus_per_slot} needs use_gpu=True")
        self.settings = settings
        self._env_vars = env_vars or {}
        self._executor = RayExecutor(
            settings,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            cooldown_range=settings.cooldown_range,
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
        )

    def start(self) -> None:
        """Make `run` possible."""
        self._executor.start(extra_env_vars=self._env_vars)

    def run(
        self,
        worker_fn: Callable[[], T],
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[T]:
        """Run ``worker_fn()`` as an elastic job; returns and raises as `RayExecutor.run`."""
        return self._executor.run(worker_fn, callbacks=callbacks)
