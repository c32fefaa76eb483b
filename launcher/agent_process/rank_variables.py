"""The environment of the ranks of one host, as its agent completes it there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hvdlite.launcher.agent_process.agent_folder import AgentFolder
from hvdlite.launcher.hosts.cores import cores
from hvdlite.launcher.hosts.visible_devices import visible_devices
from hvdlite.launcher.jobs.passed_variables import CALL_VARIABLE, home_directory, of_another_job
from hvdlite.launcher.platforms.slurm_step import without_step

MEETING = {False: "HVDLITE_RENDEZVOUS", True: "HVDLITE_ELASTIC_DRIVER"}


class RankVariables:
    """What is common to the ranks of the host; `job` is the launcher's description of it."""

    def __init__(self, job: Mapping[str, Any], folder: AgentFolder) -> None:
        own = dict(os.environ) if job["inherit"] else {}
        own.pop("PYTHONPATH", None)  # The launcher set it, so that the agent finds hvdlite.
        environ = {name: text for name, text in own.items() if not of_another_job(name)}
        environ = without_step(environ | job["variables"])  # The step is that of an agent.
        environ |= {
            "HOME": home_directory(environ) or folder.path,
            MEETING[job["elastic"]]: job["rendezvous"] or f"unix:{folder.socket}",
            "HVDLITE_SECRET": job["secret"],
            "HVDLITE_HOST_NAME": job["host"],
            CALL_VARIABLE: folder.path,
        }
        self._environ = environ
        self._job = job
        self._folder = folder
        self._local_size = len(job["ranks"])
        self._cores = 0  # That this host leaves to the job, counted when it is needed.

    def check_devices(self) -> None:
        """Raise `ConfigError` where this host has too few devices for its ranks.

        An elastic job has slots here, of which it may never use all.
        """
        if not self._job["elastic"]:
            visible_devices(self._environ, self._local_size - 1)

    def environ_of(self, rank: Mapping[str, Any]) -> dict[str, str]:
        """Return the environment of the rank that the launcher describes so."""
        mine: dict[str, str] = self._environ | rank["variables"]
        events = f"{self._job['token']} {rank['rank']} {self._folder.events}"
        mine["HVDLITE_LAUNCHER_EVENTS"] = events
        mine |= visible_devices(mine, rank["local_rank"])
        if not mine.get("OMP_NUM_THREADS"):
            mine["OMP_NUM_THREADS"] = str(self._threads(rank))
        return mine

    def cores_of(self, rank: Mapping[str, Any]) -> list[int]:
        """Return the cores that the rank is bound to: its share of ours; none if it is free."""
        if not self._job["bind"]:
            return []
        ours = sorted(os.sched_getaffinity(0))
        local_rank, share = rank["local_rank"], max(1, len(ours) // self._local_size)
        first = local_rank * share % len(ours)
        return ours[first : first + share]

    def _threads(self, rank: Mapping[str, Any]) -> int:
        """Return the threads of the rank: its share of the cores that this host leaves us."""
        self._cores = self._cores or cores()
        share = max(1, self._cores // self._local_size)
        bound = self.cores_of(rank)
        return min(share, len(bound)) if bound else share
