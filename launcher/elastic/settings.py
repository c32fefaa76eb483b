"""The settings of an elastic job, for tools written for Horovod."""

from __future__ import annotations

from typing import Any


class ElasticSettings:
    """Keeps what it is given, and any further settings, as attributes. Times are in seconds."""

    def __init__(
        self,
        discovery: Any,
        min_num_proc: int,
        max_num_proc: int | None,
        elastic_timeout: int | None,
        reset_limit: int | None,
        cooldown_range: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.discovery = discovery
        self.min_num_proc = min_num_proc
        self.max_num_proc = max_num_proc
        self.elastic_timeout = elastic_timeout
        self.reset_limit = reset_limit
        self.cooldown_range = cooldown_range
        vars(self).update(kwargs)
