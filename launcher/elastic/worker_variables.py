"""The variables that tell a worker of an elastic job its number, and its place at the start."""

from __future__ import annotations

from hvdlite.launcher.elastic.decisions.commands import StartWorker

# What scripts for Horovod find in elastic jobs: these connect the ranks by TCP, too.
OF_HOROVOD = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}


def worker_variables(worker: StartWorker, as_horovod: bool) -> dict[str, str]:
    """Return the variables of `worker` beside those of its host; they are never updated later."""
    known = {**worker.place, "HOSTNAME": worker.host, "ELASTIC": 1}
    prefixes = ("HVDLITE", "HOROVOD") if as_horovod else ("HVDLITE",)
    variables = {
        f"{prefix}_{name}": str(text) for prefix in prefixes for name, text in known.items()
    }
    return variables | {"HVDLITE_WORKER": str(worker.number)} | (OF_HOROVOD if as_horovod else {})
