"""A task of the barrier stage: it starts one rank, a process of its own, and waits for it.

A task runs in a Python process that Spark uses again for other tasks. The rank is a child of it: a
new one for each call, whose end by any signal the task can tell, and which ends with the task.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvdlite.common.connections.address import Address, listen
from hvdlite.common.meeting.meet import ServedMeeting
from hvdlite.common.meeting.placement import host_identity, order_by_host, rank_variables
from hvdlite.launcher.agents.call_back import call_back
from hvdlite.launcher.agents.channel import PART_BYTES, Channel
from hvdlite.launcher.decisions.endings import Failure
from hvdlite.launcher.function_rank import CALL, WITH_INPUT, dump_error
from hvdlite.launcher.jobs.passed_variables import CALL_VARIABLE, of_another_job
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.spark.output import CONNECT_SECONDS, RankOutput

DEVICES = "HVDLITE_SPARK_DEVICES"
TURN_SECONDS = 10.0


@dataclass(frozen=True)
class Call:
    """What the driver wants of each task."""

    pickled: bytes  # of `dump_call`
    environ: Mapping[str, str]
    executable: str | None
    secret: str
    driver: tuple[str, int]  # where the output goes


class Place(NamedTuple):
    """Where a task runs, and listens."""

    identity: str  # of the host
    address: str  # the name by which Spark reaches the host
    port: int


@dataclass(frozen=True)
class Answer:
    """How a rank has ended."""

    rank: int
    when: float  # epoch seconds
    code: int  # as a shell has it: 128 + the number of a signal
    pickled: bytes | None  # the result, or `Raised`; None: it has left none

    @property
    def failed(self) -> bool:
        """The rank has no result."""
        return bool(self.code) or self.pickled is None

    def __str__(self) -> str:
        if self.code:
            return str(Failure(self.rank, self.code))
        return f"rank {self.rank} has ended without a result (exit code 0)"


def get_available_devices() -> list[str]:
    """Return the addresses of the GPUs that Spark has given to the task of this rank."""
    return [device for device in os.environ.get(DEVICES, "").split(",") if device]


def run_task(call: Call, failures: Any) -> Iterator[Answer]:
    """Run one rank; yields its answer.

    A failure goes into the accumulator `failures`, which the driver sees while other ranks run.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    me = context.partitionId()
    here = context.getTaskInfos()[me].address.rpartition(":")[0].strip("[]")
    with ExitStack() as stack:
        output = stack.enter_context(contextlib.closing(RankOutput(call.driver, call.secret)))
        listener = stack.enter_context(listen(Address(here, 0)))
        # Each of Spark's barriers takes a second: one tells all that every task has to know.
        told = context.allGather(json.dumps([host_identity(), here, listener.getsockname()[1]]))
        tasks = [Place(*json.loads(text)) for text in told]
        order = order_by_host([task.identity for task in tasks])
        rank, first = order.index(me), tasks[order[0]]
        if rank == 0:
            meeting = ServedMeeting(listener, len(tasks), call.secret)
            stack.callback(meeting.close)
        identities = [tasks[index].identity for index in order]
        address = str(Address(first.address, first.port))
        variables = rank_variables(identities, address, call.secret)[rank]
        gpus = context.resources().get("gpu")
        variables[DEVICES] = ",".join(gpus.addresses) if gpus else ""
        try:
            with contextlib.closing(RankProcess(call, rank, variables, output)) as started:
                answer = started.answer()
        except Exception as error:  # Spark would try again, and tell it in a hundred lines
            answer = Answer(rank, time.time(), 1, dump_error(error))
    if answer.failed:
        failures.add([answer])
    yield answer


class RankProcess:
    """The process of one rank."""

    def __init__(
        self, call: Call, rank: int, variables: Mapping[str, str], output: RankOutput
    ) -> None:
        self._rank = rank
        environ = {name: text for name, text in os.environ.items() if not of_another_job(name)}
        if call.executable is None:  # another Python finds packages of its own
            environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environ["PYTHONUNBUFFERED"] = "1"  # output before a crash must not be lost in a buffer
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdlite-spark-"))
            self._folder = Path(folder)
            (self._folder / CALL).write_bytes(call.pickled)
            python = call.executable or sys.executable
            self.process = subprocess.Popen(
                [python, "-m", "hvdlite.launcher.function_rank", WITH_INPUT],
                env={**environ, **call.environ, **variables, CALL_VARIABLE: folder},
                stdin=subprocess.PIPE,
                start_new_session=True,
                **output.streams(rank),
            )
            stack.callback(self.process.wait)
            stack.callback(self.process.kill)
            output.close()
            assert self.process.stdin is not None
            # The pipe stays open: its end tells the rank that this task is no more.
            stack.callback(self.process.stdin.close)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End the process, with all that it has started."""
        self._stack.close()

    def answer(self) -> Answer:
        """Wait for the end of the process; return how it was."""
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_status:
            # Its own child processes are in the group that it led: its number is still their own.
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        answers = [path.read_bytes() for path in self._folder.glob("answer.*.pickle")]
        code = code if code >= 0 else 128 - code
        return Answer(self._rank, time.time(), code, answers[0] if answers else None)


def read_answer(answer: Answer) -> Any:
    """Return the result of a rank, or `Raised`."""
    return None if answer.pickled is None else pickle.loads(answer.pickled)


# A task of an elastic job: it is a host with one slot, for one worker, from start to end.
#
# The task is connected with the driver, which tells it when to start its worker. When the worker
# has failed, the task fails, and Spark tries it again: that is another host.
#
#   | driver -> task | |
#   |---|---|
#   | start number start_rank variables | Start worker `number`. |
#   | end goes_on | End the worker, and then the task; `goes_on`: the task is to be tried again. |
#
#   | task -> driver | |
#   |---|---|
#   | part number data | A part of the worker's answer. |
#   | exit number code by_signal | The worker has ended with this code, as a shell has it. |


def open_channel(connection: socket.socket, loop: EventLoop, received: Any, ended: Any) -> Channel:
    """Return a channel over a connection, which is the channel's from now on."""
    read_fd = connection.detach()
    return Channel(loop, read_fd, os.dup(read_fd), received=received, ended=ended)


class WorkerLostError(RuntimeError):
    """The worker of a task is lost, so Spark is to try the task again."""


def run_elastic_task(call: Call) -> Iterator[None]:
    """Run the worker of one attempt of a task; yields nothing. Raises `WorkerLostError`."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    name = f"task-{context.partitionId()}.{context.attemptNumber()}"  # And of its host.
    gpus = context.resources().get("gpu")
    devices = {DEVICES: ",".join(gpus.addresses) if gpus else ""}
    with contextlib.closing(_Task(call, name, devices)) as task:
        task.run()
    yield from ()


class _Task:
    def __init__(self, call: Call, name: str, devices: dict[str, str]) -> None:
        self._call, self._name, self._devices = call, name, devices
        self._loop = EventLoop()
        self._stack = ExitStack()
        self._process: RankProcess | None = None
        self._number = 0
        self._ends = self._again = False
        self._stack.callback(self._loop.close)
        self._output = self._stack.enter_context(
            contextlib.closing(RankOutput(call.driver, call.secret))
        )
        address = str(Address(*call.driver))
        connection = call_back([address], call.secret, name, 0.0, CONNECT_SECONDS)
        self._channel = open_channel(connection, self._loop, self._received, self._ended)
        self._stack.callback(self._channel.close)

    def run(self) -> None:
        """Obey the driver until it ends this task."""
        while not self._ends:
            self._loop.run_once(TURN_SECONDS)
        if self._again:
            raise WorkerLostError(f"the worker of {self._name} is lost: it is started elsewhere")

    def close(self) -> None:
        self._stack.close()

    def _received(self, kind: str, fields: list[Any]) -> None:
        if kind == "start" and self._process is None:
            self._start(*fields)
        elif kind == "end":
            self._ends, self._again = True, bool(fields[0])

    def _ended(self) -> None:
        self._ends = True  # The driver has gone, and Spark ends all tasks.

    def _start(self, number: int, start_rank: int, variables: dict[str, str]) -> None:
        self._number = number
        self._process = RankProcess(self._call, start_rank, self._devices | variables, self._output)
        self._stack.callback(self._process.close)
        pidfd = os.pidfd_open(self._process.process.pid)
        self._stack.callback(os.close, pidfd)
        self._loop.listen(pidfd, self._tell_end)

    def _tell_end(self, pidfd: int) -> None:
        self._loop.forget(pidfd)
        assert self._process is not None
        answer = self._process.answer()
        data = answer.pickled or b""
        for start in range(0, len(data), PART_BYTES):
            self._channel.send("part", self._number, data[start : start + PART_BYTES])
        by_signal = (self._process.process.returncode or 0) < 0
        self._channel.send("exit", self._number, answer.code, by_signal)
