"""The actor that is one rank."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from hvdlite.common.connections.address import Address, listen
from hvdlite.common.meeting.meet import ServedMeeting
from hvdlite.common.meeting.placement import host_identity
from hvdlite.launcher.function_rank import dump_error
from hvdlite.launcher.jobs.passed_variables import of_another_job
from hvdlite.ray import ray_logger

T = TypeVar("T")


class Place(NamedTuple):
    """Where an actor runs."""

    host: str  # the identity of the host
    node: str  # the address of the Ray node
    gpus: tuple[str, ...]  # those that Ray has given to this actor


class Call(NamedTuple):
    """What each worker of an elastic job runs."""

    executable_cls: type | None
    executable_args: Sequence[Any]
    executable_kwargs: Mapping[str, Any]
    function: Callable[[Any], Any]  # Called with the executable.


class Outcome(NamedTuple):
    """How a worker of an elastic job has ended."""

    code: int  # As a shell has it.
    result: Any = None
    raised: bytes | None = None  # A pickled `Raised`.
    returned: bool = False  # It has a result.


class BaseHorovodWorker:
    """A process of the cluster that becomes a rank; `RayExecutor` makes one for each."""

    executable: Any = None
    _meeting: ServedMeeting | None = None

    def place(self) -> Place:
        """Return the place of this actor."""
        import ray

        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Place(host_identity(), ray.util.get_node_ip_address(), gpus)

    def hostname(self) -> str:
        """Return the name of the host."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """Return the GPUs that Ray has given to this actor."""
        return list(self.place().gpus)

    def serve(self, size: int, secret: str) -> str:
        """Serve the meeting of `size` ranks as long as this actor lives; return its address."""
        node = self.place().node
        listener = listen(Address(node, 0))
        self._meeting = ServedMeeting(listener, size, secret)
        return str(Address(node, listener.getsockname()[1]))

    def leave(self) -> None:
        """Leave the job, and serve its meeting no longer."""
        leave_job()
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set environment variables, and drop those by which another launcher names its ranks."""
        for name in [name for name in os.environ if of_another_job(name)]:
            del os.environ[name]
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """Return the environment of this actor."""
        return dict(os.environ)

    def start_executable(
        self, executable_cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Make the object that `execute` hands to functions."""
        self.executable = leave_job_on_error(executable_cls, *args, **kwargs)

    def execute(self, fn: Callable[[Any], T], queue: Any = None) -> T:
        """Return ``fn(executable)``; the executable is None without an executable class.

        What `ray_logger` gets meanwhile goes to `queue`.
        """
        ray_logger.configure(queue)
        try:
            return leave_job_on_error(fn, self.executable)
        finally:
            ray_logger.configure(None)

    def run_elastic(
        self, variables: Mapping[str, str], gpus: tuple[int, int], call: Call, queue: Any
    ) -> Outcome:
        """Run `call` as a worker of an elastic job; return how it has ended.

        `gpus` are the local rank at the start, and the number of the GPUs of the Ray node.
        """
        self.update_env_vars({**variables, **self._visible_gpus(gpus)})
        ray_logger.configure(queue, elastic=True)
        try:
            if call.executable_cls is not None:
                args, kwargs = call.executable_args, call.executable_kwargs
                self.executable = call.executable_cls(*args, **kwargs)
            outcome = Outcome(0, call.function(self.executable), returned=True)
        except SystemExit as end:  # Also of a worker that is not needed any more.
            outcome = Outcome(end.code if isinstance(end.code, int) else int(end.code is not None))
        except Exception as error:
            outcome = Outcome(1, raised=dump_error(error))
        leave_job()
        return outcome

    def _visible_gpus(self, gpus: tuple[int, int]) -> dict[str, str]:
        """Return the variable that shows the node's GPUs, this worker's behind its local rank.

        Scripts pick a GPU by the local rank, which at the start is the number of workers before.
        """
        own = self.get_gpu_ids()
        if not own:
            return {}
        local_rank, number = gpus
        others = [gpu for gpu in map(str, range(number)) if gpu not in own]
        if len(others) + len(own) != number:  # The node has been given GPUs with other names.
            return {}
        place = local_rank * len(own)
        return {"CUDA_VISIBLE_DEVICES": ",".join([*others[:place], *own, *others[place:]])}


def leave_job_on_error(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return ``fn(*args, **kwargs)``; on an exception, let no other rank wait for this one."""
    try:
        return fn(*args, **kwargs)
    except BaseException:
        leave_job()
        raise


def leave_job() -> None:
    """Shut hvdlite down, where this process has imported it."""
    lifecycle = sys.modules.get("hvdlite.common.runtime.lifecycle")
    if lifecycle is not None:
        lifecycle.shutdown()
