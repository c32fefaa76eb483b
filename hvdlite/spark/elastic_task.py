"""A task of an elastic job: it is a host with one slot, for one worker, from start to end.

The task is connected with the driver, which tells it when to start its worker. When the worker has
failed, the task fails, and Spark tries it again: that is another host.

| driver -> task | |
|---|---|
| start number start_rank variables | Start worker `number`. |
| end goes_on | End the worker, and then the task; `goes_on`: the task is to be tried again. |

| task -> driver | |
|---|---|
| part number data | A part of the worker's answer. |
| exit number code by_signal | The worker has ended with this code, as a shell has it. |
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from hvdlite.common.connections.address import Address
from hvdlite.launcher.agents.call_back import call_back
from hvdlite.launcher.agents.channel import PART_BYTES, Channel
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.spark.output import CONNECT_SECONDS, RankOutput
from hvdlite.spark.task import DEVICES, Call, RankProcess

TURN_SECONDS = 10.0


def task_name(partition: int, attempt: int) -> str:
    """Return the name of an attempt of a task, which is the name of its host."""
    return f"task-{partition}.{attempt}"


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
    name = task_name(context.partitionId(), context.attemptNumber())
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
        """End the worker, and the connections."""
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
        self._stack.enter_context(self._process)
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
