"""What a process of a cluster is told by its environment: its role, and where the scheduler is.

The names of other parameter servers are read as well, where hvdlite's own are not set: `MS_*` of
MindSpore and `DMLC_*` of ps-lite.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.address import parse_address
from hvdlite.common.settings.config import Config
from hvdlite.ps.connections.messages import SCHEDULER, SERVER, WORKER

START_SECONDS = 1800.0
ANSWER_SECONDS = 5.0  # For which the scheduler may tell late who has not come.
_ROLES = {
    "scheduler": SCHEDULER, "server": SERVER, "worker": WORKER,
    "MS_SCHED": SCHEDULER, "MS_PSERVER": SERVER, "MS_SERVER": SERVER, "MS_WORKER": WORKER,
}  # fmt: skip
_NAMES = {
    "role": ("HVDLITE_ROLE", "MS_ROLE", "DMLC_ROLE"),
    "num_servers": ("HVDLITE_NUM_SERVERS", "MS_SERVER_NUM", "DMLC_NUM_SERVER"),
    "num_workers": ("HVDLITE_NUM_WORKERS", "MS_WORKER_NUM", "DMLC_NUM_WORKER"),
    "host": ("MS_SCHED_HOST", "DMLC_PS_ROOT_URI"),
    "port": ("MS_SCHED_PORT", "DMLC_PS_ROOT_PORT"),
    "node_id": ("HVDLITE_NODE_ID", "MS_NODE_ID"),
}


@dataclass(frozen=True)
class ClusterSettings:
    """The place of this process in a cluster."""

    role: str
    scheduler: str  # host:port
    num_servers: int
    num_workers: int
    node_id: str = ""  # By which it is known again; empty: it never comes again.
    token: bytes = b""
    independent: bool = False  # Workers are no ranks of a job: they may be lost, come and leave.
    tls: bool = False  # All that is sent is encrypted, with keys from the token.
    start_seconds: float = START_SECONDS  # Until all have come.
    server_seconds: float = 300.0  # For which a server may be silent.
    worker_seconds: float = 30.0  # For which an independent worker may be silent.
    number: int | None = None  # Among those of its role; None: the scheduler chooses one.
    snapshots: str = ""  # The folder of snapshots; empty: none are made.
    snapshot_every: int = 100  # Updates from one snapshot to the next.
    joins: bool = False  # It is one more server or worker, where all others are there.

    def count(self, role: str) -> int:
        """Return how many processes are to have a role, besides those that join."""
        return self.num_servers if role == SERVER else self.num_workers


def read_settings(environ: Mapping[str, str]) -> ClusterSettings | None:
    """Return the settings; None where the environment names no role.

    Raises ConfigError for what cannot be, naming the variable.
    """
    name, role = _find(environ, "role")
    if not role:
        return None
    if role not in _ROLES:
        raise ConfigError(f"{name}={role}: give scheduler, server or worker")
    if "HVDLITE_PS_CURVE" in environ:  # Else all would go in the clear without a word.
        raise ConfigError("HVDLITE_PS_CURVE is called HVDLITE_PS_TLS now: set that instead")
    tls = _flag(environ, "HVDLITE_PS_TLS", "encrypt all that is sent")
    if tls and not environ.get("HVDLITE_PS_TOKEN"):
        raise ConfigError(
            "HVDLITE_PS_TLS=1 makes keys of HVDLITE_PS_TOKEN, which is not set: give all "
            "processes the same"
        )
    scheduler = _scheduler(environ)
    servers, workers = _count(environ, "num_servers"), _count(environ, "num_workers")
    kind = environ.get("HVDLITE_PS_WORKERS", "independent")
    if kind not in ("mpi", "independent"):
        raise ConfigError(f"HVDLITE_PS_WORKERS={kind}: give mpi or independent")
    number = environ.get("HVDLITE_NODE_NUMBER", "")
    if number and not number.isdecimal():
        raise ConfigError(
            f"HVDLITE_NODE_NUMBER={number}: give a number among those of this role, 0 or more"
        )
    return ClusterSettings(
        role=_ROLES[role],
        scheduler=scheduler,
        num_servers=servers,
        num_workers=workers,
        node_id=_find(environ, "node_id")[1],
        token=environ.get("HVDLITE_PS_TOKEN", "").encode(),
        independent=kind == "independent",
        tls=tls,
        number=int(number) if number else None,
        joins=_flag(environ, "HVDLITE_PS_JOIN", "join a job that runs"),
        **_from_config(environ),
    )


def _from_config(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what is a setting of hvdlite-run, too; MindSpore's names count where it is not set."""
    aliases = {
        "HVDLITE_START_TIMEOUT": environ.get("MS_TOPO_TIMEOUT") or f"{START_SECONDS:g}",
        "HVDLITE_PS_TIMEOUT": environ.get("MS_NODE_TIMEOUT", ""),
    }
    if environ.get("MS_ENABLE_RECOVERY") == "1":
        aliases["HVDLITE_PS_SNAPSHOT"] = environ.get("MS_RECOVERY_PATH", "")
    given = {name: text for name, text in environ.items() if text}
    config = Config.from_environ({**aliases, **given})
    return {
        "start_seconds": config.start_timeout_seconds,
        "server_seconds": config.ps_timeout_seconds,
        "worker_seconds": config.ps_worker_timeout_seconds,
        "snapshots": config.ps_snapshot,
        "snapshot_every": config.ps_snapshot_every,
    }


def _find(environ: Mapping[str, str], what: str) -> tuple[str, str]:
    for name in _NAMES[what]:
        if environ.get(name):
            return name, environ[name]
    return _NAMES[what][0], ""


def _count(environ: Mapping[str, str], what: str) -> int:
    name, text = _find(environ, what)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}={text}: give how many there are, 1 or more")
    return int(text)


def _flag(environ: Mapping[str, str], name: str, what: str) -> bool:
    text = environ.get(name, "0")
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text}: give 1 to {what}, or 0")
    return text == "1"


def _scheduler(environ: Mapping[str, str]) -> str:
    name = "HVDLITE_SCHEDULER"
    address = environ.get(name, "")
    given, port = _find(environ, "port")
    host = _find(environ, "host")[1]
    if not address and (host or port):
        name, address = given, f"{host}:{port}"
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(
            f"{name}={address.rpartition(':')[2] if name != 'HVDLITE_SCHEDULER' else address}: "
            "give the scheduler's host and a port from 1 to 65535, as in "
            "HVDLITE_SCHEDULER=node1:4242"
        )
    parse_address(address, name)  # Of IPv6 it may lack the brackets.
    return address


def check_token(settings: ClusterSettings) -> None:
    """Raise ConfigError where other hosts can reach a cluster that has no token."""
    host = settings.scheduler.rpartition(":")[0].strip("[]")
    is_local = host == "localhost"
    with contextlib.suppress(ValueError):
        is_local = ipaddress.ip_address(host).is_loopback
    if not settings.token and not is_local:
        raise ConfigError(
            f"HVDLITE_SCHEDULER={settings.scheduler} can be reached from other hosts, and "
            "HVDLITE_PS_TOKEN is not set, so that anybody could take part: give all processes the "
            "same secret, such as what `openssl rand -hex 16` prints"
        )


def address_towards(scheduler: str) -> str:
    """Return the address of this host on the way to the scheduler."""
    host, _, port = scheduler.rpartition(":")
    family, kind, protocol, _, target = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # Sends nothing: it only finds the route.
        found = probe.getsockname()[0]
    return f"[{found}]" if family == socket.AF_INET6 else str(found)
