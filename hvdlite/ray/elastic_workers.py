"""What an elastic `RayExecutor` does: each call is an elastic job with actors of its own.

Each worker is an actor on the node that is its host.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hvdlite.launcher.decisions.commands import ElasticPlan, StartWorker
from hvdlite.launcher.elastic.direct_job import DirectJob
from hvdlite.launcher.elastic.horovod_types import HostDiscovery
from hvdlite.launcher.function_rank import Raised
from hvdlite.launcher.processes.error_text import shorten
from hvdlite.ray.fixed_workers import (
    NOT_STARTED,
    Callbacks,
    Workers,
    call_back,
    log_queue,
)
from hvdlite.ray.worker import Call, Outcome

DISCOVERY_SECONDS = 1.0  # The time between two looks at the nodes.
KILLED_CODE = 137  # Of an actor that has died: nobody tells by what.


# The alive nodes of a Ray cluster as hosts of an elastic job, and their slots.


class RayHostDiscovery(HostDiscovery):
    """Finds the alive nodes, and how many workers each has room for in all its resources.

    A worker takes `cpus_per_slot` cores and, with `use_gpu`, `gpus_per_slot` GPUs. A host is named
    by the address of its node; a second node of one address gets a number behind it.
    """

    def __init__(
        self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float | None = None
    ) -> None:
        self._wanted = {"CPU": cpus_per_slot, "GPU": (gpus_per_slot or 1) if use_gpu else 0}
        # The alive nodes by name, as of the last look. A node keeps its name while it is alive.
        self.nodes: dict[str, Mapping[str, Any]] = {}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots of each host; one without room for a worker is left out."""
        self.look()
        slots = {name: self._room(node["Resources"]) for name, node in self.nodes.items()}
        return {name: number for name, number in slots.items() if number}

    def look(self) -> None:
        """Look which nodes are alive."""
        import ray

        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        nodes = {
            name: alive.pop(node["NodeID"])
            for name, node in self.nodes.items()
            if node["NodeID"] in alive
        }
        for node in alive.values():
            address = node["NodeManagerAddress"]
            number, name = 1, address
            while name in nodes:
                number, name = number + 1, f"{address}#{number + 1}"
            nodes[name] = node
        self.nodes = nodes

    def _room(self, resources: Mapping[str, float]) -> int:
        rooms = [resources.get(name, 0) // each for name, each in self._wanted.items() if each]
        return int(min(rooms, default=0))


@dataclass
class ElasticWorkers:
    """The plan of the jobs, and what their workers get.

    `start_seconds` is how long Ray may take to find room for an actor, and the actor to come to
    `init`.
    """

    plan: ElasticPlan
    wanted: Workers
    discovery: HostDiscovery
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
            raise RuntimeError(NOT_STARTED)
        import ray

        call = ray.put(self._call._replace(function=function))
        with log_queue(callbacks) as queue:
            job = ElasticRayJob(self, call, {k: str(v) for k, v in self._extra.items()}, queue)
            finish = job.drive(lambda: call_back(queue, callbacks))
            call_back(queue, callbacks)
            return job.take_results(finish)

    def run_remote(self, function: Callable[[Any], Any]) -> list[Any]:
        """Return Ray's references to the results, when the job has ended."""
        import ray

        return [ray.put(result) for result in self.run(function)]

    def run_single(self, function: Callable[[Any], Any]) -> Any:
        """Raise `ValueError`: nobody is rank 0 for long."""
        raise ValueError("execute_single: the ranks of an elastic job change; use execute()")


class ElasticRayJob(DirectJob):
    """Runs the call of `call`, a reference, in actors that get the variables `extra`, too.

    Actors log to `queue`, where there is one.
    """

    def __init__(
        self, workers: ElasticWorkers, call: Any, extra: dict[str, str], queue: Any
    ) -> None:
        import ray

        super().__init__(workers.plan, ray.util.get_node_ip_address(), workers.start_seconds)
        self._wanted, self._call, self._queue = workers.wanted, call, queue
        self._variables = {**workers.variables, **extra}
        discovery = workers.discovery
        # Knows which node a host is.
        self._nodes = discovery if isinstance(discovery, RayHostDiscovery) else RayHostDiscovery()
        self._actors: dict[int, Any] = {}  # Of all workers, until they are killed.
        self._thread = threading.Thread(
            target=self._discover, args=[discovery], name="hvdlite-discovery", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.over.set()
        self._thread.join(DISCOVERY_SECONDS)
        super().close()

    def _discover(self, discovery: HostDiscovery) -> None:
        """Ask for the hosts again and again, and tell the driver of each change."""
        last: list[tuple[str, int]] | None = None
        while not self.over.is_set():
            try:
                found = dict(discovery.find_available_hosts_and_slots())
            except Exception as error:
                last = None
                text = f"{type(error).__name__}: {error}"
                self.loop.post(partial(self._tell, self.driver.discovery_failed, text))
            else:
                if list(found.items()) != last:
                    last = list(found.items())
                    self.loop.post(partial(self._tell, self.driver.discovered, found))
            self.over.wait(DISCOVERY_SECONDS)

    def _tell(self, event: Callable[[Any, float], None], value: Any) -> None:
        event(value, self.loop.now())

    # -- actors

    def start_process(self, worker: StartWorker, variables: dict[str, str]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        number = worker.number
        if worker.host not in self._nodes.nodes:
            self._nodes.look()
        node = self._nodes.nodes.get(worker.host)
        if node is None:
            self.ended(number, 1, f"no alive node of Ray has the address {worker.host}")
            return
        strategy = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        actor = self._actors[number] = self._wanted.start_actor(strategy)
        gpus = (worker.place["LOCAL_RANK"], int(node["Resources"].get("GPU", 0)))
        answer = actor.run_elastic.remote(
            self._variables | variables,
            gpus if self._wanted.gpus else None,
            self._call,
            self._queue,
        )
        answer.future().add_done_callback(
            lambda future: self.loop.post(lambda: self._take_answer(number, future))
        )

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
            if not outcome.returned:  # One that has returned may still be needed by the others.
                self.end_process(number)  # Its actor would keep its cores from the next.
            raised = outcome.raised
            answer = outcome.result if raised is None else pickle.loads(raised)
            self.take_answer(number, answer, outcome.code)

    def end_process(self, number: int) -> None:
        """Ray knows no other end of an actor than its death."""
        import ray

        actor = self._actors.pop(number, None)
        if actor is not None:
            ray.kill(actor)

    def end_all(self) -> None:
        for number in list(self._actors):
            self.end_process(number)
