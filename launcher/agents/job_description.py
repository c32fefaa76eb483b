"""What the launcher tells agents about a job, about its ranks, and of files that they need."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from hvdlite.common.meeting.placement import place_variables, places
from hvdlite.common.settings.config import Config
from hvdlite.launcher.agents.agent_connection import AgentHost
from hvdlite.launcher.agents.channel import PART_BYTES
from hvdlite.launcher.command_line.debug_rank import terminals
from hvdlite.launcher.command_line.launcher_choice import SRUN
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.jobs.passed_variables import names_for_other_hosts
from hvdlite.launcher.mpirun.mpi import binds_ranks

SLURM_SIZES = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")


class JobDescription:
    """A job in the words of the channel."""

    def __init__(
        self, options: LaunchOptions, environ: Mapping[str, str], hosts: tuple[AgentHost, ...]
    ) -> None:
        self._options, self._environ = options, environ
        elastic = options.elastic
        self._silence_seconds = (
            elastic.host_timeout_seconds if elastic
            else Config.from_environ(environ).peer_timeout_seconds
        )  # fmt: skip
        self._places = places([host.name for host in hosts for _ in host.ranks])
        self._secret = os.urandom(16).hex()
        self._token = f"hvdlite-rank-{os.urandom(8).hex()}"
        self._directory = os.getcwd()

    def for_host(self, host: AgentHost) -> dict[str, Any]:
        """Return what the agent of `host` must know before it starts ranks."""
        environ, pod, elastic = self._environ, self._options.torch_pod, self._options.elastic
        names = names_for_other_hosts(environ) if host.remote else environ
        return {
            "directory": self._directory,
            "variables": {name: environ[name] for name in names},
            "inherit": host.remote,  # Its own environment is the base of that of the ranks.
            "host": host.name,
            "ranks": list(host.ranks),
            "size": self._options.size,
            "secret": pod.secret if pod else self._secret,
            "rendezvous": str(pod.master) if pod else "",  # Empty: at the agent.
            "token": self._token,
            "bind": binds_ranks(self._options.binding_args),
            "silence_seconds": self.silence_of(host),
            "elastic": elastic is not None,
            "worker_silence_seconds": elastic.worker_timeout_seconds if elastic else 0.0,
            "call": None if host.remote else self._options.call,
        }

    def silence_of(self, host: AgentHost) -> float:
        """Return after how many seconds of silence launcher and agent lose each other; 0: never."""
        return self._silence_seconds if host.remote else 0.0

    def for_rank(self, host: AgentHost, rank: int) -> dict[str, Any]:
        """Return what the agent must know to start `rank`."""
        options, pod = self._options, self._options.torch_pod
        local_rank = host.ranks.index(rank)
        place = self._places[options.ranks.index(rank)]
        if pod is not None:
            among = {"CROSS_RANK": pod.index, "CROSS_SIZE": pod.pods}
            place = {**place, "RANK": rank, "SIZE": pod.size, **among}
        variables = place_variables(place, options.as_horovod)
        if options.cluster is not None:
            variables |= {"HVDLITE_NODE_ID": f"worker{rank}", "HVDLITE_NODE_NUMBER": str(rank)}
        if options.torchrun_env:
            variables |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(options.size),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(len(host.ranks)),
            }
        if options.launcher == SRUN:  # Slurm describes the task that is the agent.
            variables |= {
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(local_rank),
                **dict.fromkeys(SLURM_SIZES, str(options.num_proc)),
            }
        debugged = options.debug_rank == rank
        if options.debug_rank is not None and not debugged:
            # A debugger in this rank would find the end of its input, and end it.
            variables["PYTHONBREAKPOINT"] = "0"
        return self.start(rank, local_rank, variables, terminals() if debugged else {})

    def for_server(self, key: int, number: int) -> dict[str, Any]:
        """Return what the agent must know to start a server; `key` takes the place of a rank."""
        return self.start(key, 0, {
            "HVDLITE_ROLE": "server", "HVDLITE_NODE_ID": f"server{number}",
            "HVDLITE_NODE_NUMBER": str(number),
        })  # fmt: skip

    def start(
        self, rank: int, local_rank: int, variables: Mapping[str, str],
        terminals: Mapping[int, str] = MappingProxyType({}),
    ) -> dict[str, Any]:  # fmt: skip
        """Return what an agent must know to start a process."""
        return {
            "rank": rank, "local_rank": local_rank, "command": list(self._options.command),
            "variables": dict(variables), "terminals": dict(terminals),
        }  # fmt: skip

    # -- hvdlite.run: the call goes there, and the answers come back

    def messages_of_files(self, host: AgentHost) -> Iterator[tuple[str, str, bytes]]:
        """Yield the files of a call of `hvdlite.run` in parts, for a host that cannot see them."""
        if self._options.call is None or not host.remote:
            return
        for entry in os.scandir(self._options.call):
            with open(entry.path, "rb") as file:
                while part := file.read(PART_BYTES):
                    yield "part", entry.name, part

    def keep_answer(self, rank: int, data: bytes) -> None:
        """Append a part of the answer of `rank` to the file that `hvdlite.run` reads."""
        if self._options.call is not None:
            with open(os.path.join(self._options.call, f"answer.{rank}.pickle"), "ab") as file:
                file.write(data)
