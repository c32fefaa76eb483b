"""hvdlite.ray: training on a Ray cluster, with Horovod's RayExecutor, or inside Ray Train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdlite import missing_names
from hvdlite.ray import ray_logger
from hvdlite.ray.elastic import ElasticRayExecutor
from hvdlite.ray.runner import RayExecutor
from hvdlite.ray.worker import BaseHorovodWorker

if TYPE_CHECKING:
    from hvdlite.ray.train import HvdliteConfig

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "HvdliteConfig", "RayExecutor", "ray_logger"]


def __getattr__(name: str) -> Any:
    """Import Ray Train for those who ask for what stands on it."""
    if name == "HvdliteConfig":
        from hvdlite.ray.train import HvdliteConfig

        return HvdliteConfig
    raise missing_names.attribute_error(__name__, name)
