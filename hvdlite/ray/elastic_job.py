"""An elastic job on Ray: each worker is an actor on the node that is its host."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from hvdlite.launcher.decisions.commands import ElasticPlan, StartWorker
from hvdlite.launcher.elastic.direct_job import DirectJob
from hvdlite.launcher.elastic.discovery import HostDiscovery
from hvdlite.launcher.processes.error_text import shorten
from hvdlite.launcher.worker import Raised
from hvdlite.ray.discovery import DiscoveryThread, RayHostDiscovery
from hvdlite.ray.placement import Workers
from hvdlite.ray.worker import BaseHorovodWorker, Outcome

KILLED_CODE = 137  # Of an actor that has died: nobody tells by what.


class ElasticRayJob(DirectJob):
    """Runs the call of `call`, a reference, in actors with `variables` that take `wanted` each.

    Actors log to `queue`, where there is one. `start_seconds` is how long Ray may take to find room
    for an actor, and the actor to come to `init`.
    """

    def __init__(
        self,
        plan: ElasticPlan,
        wanted: Workers,
        discovery: HostDiscovery,
        call: Any,
        *,
        variables: dict[str, str],
        queue: Any,
        start_seconds: float,
    ) -> None:
        import ray

        super().__init__(plan, ray.util.get_node_ip_address(), start_seconds)
        self._wanted, self._call, self._variables, self._queue = wanted, call, variables, queue
        self._nodes = RayHostDiscovery()  # Knows which node a host is.
        if isinstance(discovery, RayHostDiscovery):
            self._nodes = discovery
        self._actors: dict[int, Any] = {}  # Of all workers, until they are killed.
        self._thread = DiscoveryThread(
            discovery.find_available_hosts_and_slots, self._discovered, self._failed
        )

    def close(self) -> None:
        """See `DirectJob.close`."""
        self._thread.close()
        super().close()

    # -- discovery

    def _discovered(self, hosts: dict[str, int]) -> None:
        self.post(lambda: self.driver.discovered(hosts, self.now()))

    def _failed(self, text: str) -> None:
        self.post(lambda: self.driver.discovery_failed(text, self.now()))

    # -- actors

    def start_process(self, worker: StartWorker, variables: dict[str, str]) -> None:
        """See `DirectJob.start_process`."""
        number, node = worker.number, self._node(worker.host)
        if node is None:
            self.ended(number, 1, f"no alive node of Ray has the address {worker.host}")
            return
        actor = self._actor(node)
        self._actors[number] = actor
        gpus = (worker.place["LOCAL_RANK"], int(node["Resources"].get("GPU", 0)))
        answer = actor.run_elastic.remote(
            self._variables | variables,
            gpus if self._wanted.gpus else None,
            self._call,
            self._queue,
        )
        answer.future().add_done_callback(self._when_done(number))

    def _node(self, host: str) -> Any:
        if host not in self._nodes.nodes:
            self._nodes.look()
        return self._nodes.nodes.get(host)

    def _actor(self, node: Any) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        return (
            ray.remote(BaseHorovodWorker)
            .options(
                num_cpus=self._wanted.cpus,
                num_gpus=self._wanted.gpus,
                scheduling_strategy=strategy,
            )
            .remote()
        )

    def _when_done(self, number: int) -> Callable[[Any], None]:
        return lambda future: self.post(lambda: self._take_answer(number, future))

    def _take_answer(self, number: int, future: Any) -> None:
        import ray

        try:
            outcome: Outcome = future.result()
        except ray.exceptions.RayActorError as error:
            # What follows the first sentence is pages of advice for operators of the cluster.
            reason = str(error).strip().rpartition("\n")[2].partition(". ")[0]
            self.ended(number, KILLED_CODE, f"its Ray actor has died: {reason}", by_signal=True)
        except Exception as error:  # Its result cannot be sent, for example.
            self.raised[number] = Raised(error, str(error), False, 0.0)
            self.ended(number, 1, shorten(f"{type(error).__name__}: {error}"))
        else:
            self._take_outcome(number, outcome)

    def _take_outcome(self, number: int, outcome: Outcome) -> None:
        cause = None
        if outcome.raised is not None:
            self.raised[number] = pickle.loads(outcome.raised)
            cause = shorten(self.raised[number].text.rstrip().rpartition("\n")[2])
        else:
            self.results[number] = outcome.result
        if not outcome.returned:  # One that has returned may still be needed by the other ranks.
            self.end_process(number, kill=True)  # Its actor would keep its cores from the next.
        self.ended(number, outcome.code, cause)

    def end_process(self, number: int, kill: bool) -> None:
        """See `DirectJob.end_process`: Ray knows no other end of an actor than its death."""
        import ray

        actor = self._actors.pop(number, None)
        if actor is not None:
            ray.kill(actor)

    def end_all(self) -> None:
        """See `DirectJob.end_all`."""
        for number in list(self._actors):
            self.end_process(number, kill=True)
