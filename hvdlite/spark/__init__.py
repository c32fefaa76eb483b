"""hvdlite.spark: a function on ranks that are the tasks of a Spark job."""

from __future__ import annotations

from hvdlite import missing_names
from hvdlite.spark.elastic import run_elastic
from hvdlite.spark.runner import run

__all__ = ["run", "run_elastic"]
__getattr__ = missing_names.module_getattr(__name__)
