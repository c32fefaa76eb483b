"""The settings of jobs: how ranks start and meet, elastic training, and parameter servers."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.common.plain.collective_settings import CollectiveSettings
from hvdlite.common.plain.setting import boolean, choice, name_list, number, port_range, setting

LAUNCHERS = ("auto", "ssh", "srun", "jsrun", "mpirun")
TRANSPORTS = ("auto", "tcp", "mpi")
ADMISSIONS = ("ready", "wait")
PS_WORKERS = ("mpi", "independent")


@dataclass(frozen=True, kw_only=True)
class JobSettings(CollectiveSettings):
    """Where ranks meet, and how long they wait for each other. Units end the names."""

    start_timeout_seconds: float = setting(
        120.0, "START_TIMEOUT", number(float, 1, "seconds"),
        "How long all ranks may take until every one has started.",
        flag="--start-timeout",
    )  # fmt: skip
    launcher: str = setting(
        "auto", "LAUNCHER", choice(*LAUNCHERS),
        "What starts the ranks: ssh (agents, on this host without ssh), srun or jsrun (agents, by "
        "Slurm or LSF), mpirun, or auto.",
        flag="--launcher", alias=False,
    )  # fmt: skip
    transport: str = setting(
        "auto", "TRANSPORT", choice(*TRANSPORTS),
        "What connects the ranks: tcp, mpi (in a job that MPI has started), or auto: mpi where MPI "
        "has started the ranks and every host has a fabric, tcp otherwise.",
        flag="--transport", alias=False,
    )  # fmt: skip
    network_interfaces: tuple[str, ...] = setting(
        (), "NETWORK_INTERFACES", name_list,
        "Where ranks listen for other hosts: interfaces, addresses or subnets, such as "
        "eth0,10.1.0.0/16; by default all interfaces but the loopback and bridges inside a host.",
        flag="--network-interfaces", alias=False,
    )  # fmt: skip
    tcp_ports: tuple[int, ...] = setting(
        (), "TCP_PORTS", port_range,
        "First and last port on which ranks listen for other hosts, such as 12000-12100; "
        "by default any port.",
        flag="--tcp-ports", alias=False,
    )  # fmt: skip
    tcp_streams: int = setting(
        1, "TCP_STREAMS", number(int, 1, "connections", 16),
        "Connections for large tensors between two ranks of different hosts; that of rank 0 holds. "
        "More than 1 help only where the network limits each connection.",
        flag="--tcp-streams", alias=False,
    )  # fmt: skip
    peer_timeout_seconds: float = setting(
        10.0, "PEER_TIMEOUT", number(float, 2, "seconds"),
        "How long another host may be silent before its ranks count as lost.",
        flag="--peer-timeout", alias=False,
    )  # fmt: skip
    elastic_timeout_seconds: float = setting(
        600.0, "ELASTIC_TIMEOUT", number(float, 0, "seconds"),
        "Elastic training: how long fewer slots than -np (at the start) or --min-np may last.",
        flag="--elastic-timeout",
    )  # fmt: skip
    elastic_admit: str = setting(
        "ready", "ELASTIC_ADMIT", choice(*ADMISSIONS),
        "Elastic training: admit new ranks when they are ready, or let the next commit wait for "
        "them as soon as their host is seen; --as-horovod means wait.",
        alias=False,
    )  # fmt: skip
    elastic_host_timeout_seconds: float = setting(
        1.0, "ELASTIC_HOST_TIMEOUT", number(float, 0.2, "seconds"),
        "Elastic training: how long another host may be silent before its ranks count as lost.",
        alias=False,
    )  # fmt: skip
    elastic_worker_timeout_seconds: float = setting(
        10.0, "ELASTIC_WORKER_TIMEOUT", number(float, 2, "seconds"),
        "Elastic training: how long a rank may be silent before it counts as lost.",
        alias=False,
    )  # fmt: skip
    elastic_check: bool = setting(
        False, "ELASTIC_CHECK", boolean,
        "Elastic training: compare the state of all ranks after each reset, bit by bit.",
        alias=False,
    )  # fmt: skip
    ps_servers: int = setting(
        0, "PS_SERVERS", number(int, 0, "servers"),
        "Parameter server: how many servers hvdlite-run starts beside the workers; 0: none.",
        flag="--ps-servers", yaml="parameter_server.servers", alias=False,
    )  # fmt: skip
    ps_workers: str = setting(
        "mpi", "PS_WORKERS", choice(*PS_WORKERS),
        "Parameter server: workers are the ranks of a job (mpi), or processes that may be lost, "
        "return, come and leave, and have no collectives (independent). Processes that are started "
        "by hand are independent where this is not set.",
        flag="--ps-workers", yaml="parameter_server.workers", alias=False,
    )  # fmt: skip
    ps_snapshot: str = setting(
        "", "PS_SNAPSHOT", str,
        "Parameter server: the folder in which servers save their tables, and from which one that "
        "is started again goes on.",
        flag="--ps-snapshot", yaml="parameter_server.snapshot", alias=False,
    )  # fmt: skip
    ps_snapshot_every: int = setting(
        100, "PS_SNAPSHOT_EVERY", number(int, 1, "updates"),
        "Parameter server: a snapshot is made every so many updates; with 1, a server that is lost "
        "changes nothing.",
        flag="--ps-snapshot-every", yaml="parameter_server.snapshot_every", alias=False,
    )  # fmt: skip
    ps_restarts: int = setting(
        3, "PS_RESTARTS", number(int, 0, "restarts"),
        "Parameter server: how often hvdlite-run starts a server again that was killed, and an "
        "independent worker.",
        flag="--ps-restarts", yaml="parameter_server.restarts", alias=False,
    )  # fmt: skip
    ps_timeout_seconds: float = setting(
        300.0, "PS_TIMEOUT", number(float, 1, "seconds"),
        "Parameter server: how long a server may be silent before it is lost for good.",
        flag="--ps-timeout", yaml="parameter_server.timeout", alias=False,
    )  # fmt: skip
    ps_worker_timeout_seconds: float = setting(
        30.0, "PS_WORKER_TIMEOUT", number(float, 1, "seconds"),
        "Parameter server: how long an independent worker may be silent before the others go on "
        "without it.",
        flag="--ps-worker-timeout", yaml="parameter_server.worker_timeout", alias=False,
    )  # fmt: skip
