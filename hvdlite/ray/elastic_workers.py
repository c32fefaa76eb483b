"""What an elastic `RayExecutor` does: each call is an elastic job with actors of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlite.launcher.decisions.commands import ElasticPlan, Finish
from hvdlite.launcher.elastic.discovery import HostDiscovery
from hvdlite.ray.answers import LOOK_SECONDS, call_back
from hvdlite.ray.discovery import RayHostDiscovery
from hvdlite.ray.elastic_job import ElasticRayJob
from hvdlite.ray.placement import Workers
from hvdlite.ray.worker import Call

Callbacks = Sequence[Callable[[Any], Any]]
INTERRUPTED_CODE = 130


@dataclass
class ElasticWorkers:
    """The plan of the jobs, and what their workers get; `discovery` None means Ray's nodes."""

    plan: ElasticPlan
    wanted: Workers
    discovery: HostDiscovery | None
    variables: Mapping[str, str]
    start_seconds: float
    _call: Call | None = field(default=None, init=False)
    _extra: Mapping[str, Any] = field(default_factory=dict, init=False)

    @property
    def started(self) -> bool:
        """Whether `start` was called, and `shutdown` was not."""
        return self._call is not None

    def start(
        self,
        executable_cls: type | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        extra_env_vars: Mapping[str, Any],
    ) -> None:
        """Take what each worker does first. Workers start with each call."""
        self._call = Call(executable_cls, args, kwargs, lambda executable: None)
        self._extra = extra_env_vars

    def shutdown(self) -> None:
        """Forget what `start` took; no worker runs outside of a call."""
        self._call = None

    def run(self, function: Callable[[Any], Any], callbacks: Callbacks = ()) -> list[Any]:
        """Run ``function(executable)`` as an elastic job; return the results in rank order."""
        if self._call is None:
            raise RuntimeError("this RayExecutor has no workers: call start() before")
        if not callbacks:
            return self._run(self._call._replace(function=function), None, ())
        from ray.util.queue import Queue

        queue = Queue(actor_options={"num_cpus": 0})
        try:
            return self._run(self._call._replace(function=function), queue, callbacks)
        finally:
            queue.shutdown(force=True)

    def _run(self, call: Call, queue: Any, callbacks: Callbacks) -> list[Any]:
        import ray

        discovery = self.discovery
        if discovery is None:
            wanted = self.wanted
            discovery = RayHostDiscovery(bool(wanted.gpus), wanted.cpus, wanted.gpus or None)
        job = ElasticRayJob(
            self.plan,
            self.wanted,
            discovery,
            ray.put(call),
            variables={**self.variables, **{k: str(v) for k, v in self._extra.items()}},
            queue=queue,
            start_seconds=self.start_seconds,
        )
        return job.take_results(_drive(job, lambda: call_back(queue, callbacks)))


def _drive(job: ElasticRayJob, look: Callable[[], None]) -> Finish:
    """Run the job in a thread, and call `look` meanwhile and at its end; return how it ended."""
    ends: list[Finish] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            ends.append(job.run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hvdlite-driver")
    thread.start()
    try:
        while thread.is_alive():
            thread.join(LOOK_SECONDS)
            look()
    finally:  # Ctrl-C, and errors of callbacks, end the job.
        job.stop(INTERRUPTED_CODE, "the call was interrupted")
        thread.join()
    if errors:
        raise errors[0]
    look()
    return ends[0]
