"""hvdlite as a backend of Ray Train: the workers of a DataParallelTrainer are the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend, BackendConfig

from hvdlite.common.meeting.placement import new_secret, rank_variables
from hvdlite.ray.runner import Settings
from hvdlite.ray.worker import BaseHorovodWorker

_worker = BaseHorovodWorker()  # what a worker process of Ray Train is to hvdlite


@dataclass
class HvdliteConfig(BackendConfig):
    """Give it to ``DataParallelTrainer(train, backend_config=HvdliteConfig())``.

    The function `train` calls ``init()``; its rank is Ray Train's world rank. `timeout_s` is how
    long all ranks may take to meet in ``init()``, in seconds; `nics` are the network interfaces
    that they use. TorchTrainer needs none of this: hvdlite finds the ranks of torch itself.
    """

    timeout_s: float = 120
    nics: Sequence[str] | None = None

    @property
    def backend_cls(self) -> type[Backend]:
        """Return the class that Ray Train makes the backend of."""
        return _HvdliteBackend

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, which Ray shows."""
        return {"timeout_s": self.timeout_s, "nics": self.nics}


class _HvdliteBackend(Backend):
    # As TorchTrainer: each worker sees the GPUs of its host, and picks that of its local rank.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: HvdliteConfig) -> None:
        """Tell each worker its rank, and let the first one serve the meeting."""
        hosts = [place.host for place in worker_group.execute(_place)]
        secret = new_secret()
        address = worker_group.execute_single(0, _serve, len(hosts), secret)
        settings = Settings(backend_config.timeout_s, nics=backend_config.nics).variables()
        for rank, variables in enumerate(rank_variables(hosts, address, secret)):
            worker_group.execute_single(rank, _update_env_vars, settings | variables)

    def on_shutdown(self, worker_group: Any, backend_config: HvdliteConfig) -> None:
        worker_group.execute(_leave)


def _place() -> Any:
    return _worker.place()


def _serve(size: int, secret: str) -> str:
    return _worker.serve(size, secret)


def _update_env_vars(variables: dict[str, str]) -> None:
    _worker.update_env_vars(variables)


def _leave() -> None:
    _worker.leave()
