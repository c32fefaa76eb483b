"""The numbers of a job in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.base.metrics import JOB_METRICS, METRICS, PREFIX, Metric
from hvdlite.launcher.live.job_view import KINDS, JobView

FRESH_SECONDS = 1.0  # No rank sends more often.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OF_A_RANK = ("rank", "host")


class PrometheusPage:
    """The page of metrics of one job, which is made at most once a second."""

    def __init__(self, job: JobView, clock: Callable[[], float]) -> None:
        """Prepare the page. Raises `ConfigError` where prometheus-client is missing."""
        try:
            from prometheus_client import CollectorRegistry, core, generate_latest
        except ImportError:
            raise ConfigError(
                "--metrics-port needs prometheus-client: pip install 'hvdlite[live]'"
            ) from None
        self._job, self._clock, self._core = job, clock, core
        registry = CollectorRegistry()
        registry.register(self)
        self._make: Callable[[], bytes] = lambda: generate_latest(registry)
        self._page, self._made_at = b"", -FRESH_SECONDS

    def text(self) -> bytes:
        """Return the page."""
        now = self._clock()
        if now - self._made_at >= FRESH_SECONDS:
            self._page, self._made_at = self._make(), now
        return self._page

    # -- what prometheus-client calls

    def describe(self) -> list[Any]:
        """Return nothing: all is known by `collect`."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics."""
        ranks, now = self._job.in_order(), self._clock()
        for metric in METRICS.values():
            family = self._family(metric, *OF_A_RANK)
            for rank in ranks:
                place = [str(rank.rank), rank.host]
                if not metric.label and metric.name in rank.values:
                    family.add_metric(place, rank.values[metric.name])
                for key, value in rank.values.items() if metric.label else ():
                    name, _, label = key.partition(".")
                    if name == metric.name:
                        family.add_metric([*place, label], value)
            if family.samples:
                yield family
        yield from self._of_job(now)

    def _of_job(self, now: float) -> Iterator[Any]:
        of = {metric.name: metric for metric in JOB_METRICS}
        family = self._family(of["ranks"])
        family.add_metric([], len(self._job.ranks))
        yield family
        family = self._family(of["events_total"])
        for kind in KINDS:
            family.add_metric([kind], self._job.counted[kind])
        yield family
        family = self._family(of["age_seconds"], *OF_A_RANK)
        for rank in self._job.in_order():
            family.add_metric([str(rank.rank), rank.host], max(rank.age(now), 0.0))
        yield family

        straggler = self._job.watch.current
        if straggler is not None:
            family = self._family(of["straggler_seconds"], *OF_A_RANK)
            for number in straggler.ranks:
                if number not in self._job.ranks:  # It was one of the world before.
                    continue
                place = [str(number), self._job.ranks[number].host]
                family.add_metric([*place, straggler.cause], straggler.seconds)
            yield family

    def _family(self, metric: Metric, *labels: str) -> Any:
        kind = "CounterMetricFamily" if metric.counts else "GaugeMetricFamily"
        names = [*labels, *([metric.label] if metric.label else [])]
        return getattr(self._core, kind)(PREFIX + metric.name, metric.help, labels=names)
