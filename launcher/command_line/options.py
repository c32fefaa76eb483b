"""From the command line to what is to be run: every contradiction is found here, before a start."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.settings.config import Config, settings
from hvdlite.launcher.command_line.config_file import read_config_file
from hvdlite.launcher.command_line.debug_rank import PATIENCE, check_debug_rank
from hvdlite.launcher.command_line.job_kinds import (
    ClusterOptions,
    ElasticOptions,
    check_not_elastic,
    cluster_options,
    elastic_options,
)
from hvdlite.launcher.command_line.launcher_choice import (
    GROUPS,
    JSRUN,
    MPIRUN,
    SSH,
    choose_launcher,
)
from hvdlite.launcher.command_line.live_options import NOT_SHOWN, LiveOptions, live_options
from hvdlite.launcher.hosts.hosts import Host, parse_hosts, ranks_per_host, read_hostfile
from hvdlite.launcher.hosts.resources import cores
from hvdlite.launcher.mpirun.mpi import BINDING_FLAGS, flags_in
from hvdlite.launcher.platforms.batch_systems import (
    SLURM,
    Allocation,
    compute_hosts,
    find_allocation,
)
from hvdlite.launcher.platforms.kubernetes import (
    LauncherPod,
    TorchPod,
    find_launcher_pod,
    find_torch_pod,
    with_own_pod_local,
    words_of,
)

# Flags that become fields of `LaunchOptions` as they are.
AS_GIVEN = ("ssh_port", "ssh_identity_file", "tcp", "as_horovod", "torchrun_env", "debug_rank",
            "output_filename", "prefix_timestamp", "verbose")  # fmt: skip
AGENT_BINDING_FLAGS = {"bind-to", "cpu-bind"}
# Of two settings, the second says nothing (or the opposite) once the first is given.
CONTRADICTIONS = (
    ("hierarchical_allreduce", "allreduce"),
    ("stall_check_disable", "stall_warning_seconds"),
    ("stall_check_disable", "stall_shutdown_seconds"),
)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """One job. `variables` are the environment variables that flags and the config file set."""

    command: tuple[str, ...]
    num_proc: int
    hosts: tuple[Host, ...] = ()  # empty: this host, or the Slurm allocation
    allocation: Allocation | None = None  # where a batch system names the hosts, and no flag does
    variables: Mapping[str, str]
    start_timeout_seconds: float
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_args: tuple[str, ...] = ()  # further arguments of ssh; those above win
    launcher_pod: LauncherPod | None = None  # the hosts are those of its hostfile
    torch_pod: TorchPod | None = None  # this pod runs some ranks of a job of several
    network_interfaces: tuple[str, ...] = ()
    peer_timeout_seconds: float = 10.0  # how long a host may be silent
    check_hosts: bool = True  # look at several hosts before the start
    mpi_args: tuple[str, ...] = ()
    binding_args: tuple[str, ...] = ()
    tcp: bool = False
    as_horovod: bool = False
    torchrun_env: bool = False
    debug_rank: int | None = None
    output_filename: str | None = None
    prefix_timestamp: bool = False
    verbose: bool = False
    notes: tuple[str, ...] = ()  # warnings for the user
    cluster: ClusterOptions | None = None  # None: there is no parameter server
    elastic: ElasticOptions | None = None  # None: the ranks stay as they are
    launcher: str = MPIRUN  # SSH (agents, here and on other hosts), SRUN, JSRUN, MPIRUN
    live: LiveOptions = NOT_SHOWN
    call: str | None = None  # of hvdlite.run: the folder with the call, and for the answers

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of ranks of each host."""
        return ranks_per_host(self.hosts, self.num_proc) if self.hosts else (self.num_proc,)

    @property
    def ranks(self) -> range:
        pod = self.torch_pod
        first = pod.index * pod.ranks_per_pod if pod else 0
        return range(first, first + self.num_proc)

    @property
    def size(self) -> int:
        """The number of ranks of the job, also of those that are started elsewhere."""
        return self.torch_pod.size if self.torch_pod else self.num_proc

    @property
    def remote(self) -> bool:
        """A rank runs on another host."""
        return any(host.remote for host in self.hosts)


def resolve(args: argparse.Namespace, environ: Mapping[str, str]) -> LaunchOptions:
    """Check the flags against each other, the config file and the environment.

    Raises `ConfigError` with one sentence that names the flag, key or variable at fault.
    """
    if not args.command and not args.check_hosts:
        raise ConfigError("no command given, such as: hvdlite-run -np 4 python train.py")
    hosts_given = args.hosts is not None or args.hostfile is not None
    pod = None if hosts_given else find_launcher_pod(environ)
    elastic = args.min_np is not None or args.host_discovery_script is not None
    if not elastic:
        check_not_elastic(args)
    given = _hosts(args, pod)
    named = given or args.host_discovery_script is not None
    torch_pod = None if named or elastic else find_torch_pod(environ, args.num_proc)
    allocation = None if named or torch_pod else find_allocation(environ)
    hosts = given or _hosts_of(allocation, args.num_proc)
    notes = list(args.notes)
    variables = _variables(args, environ, notes)
    live = live_options(args)
    if live.counts:
        variables["HVDLITE_LIVE"] = "1"
    config = Config.from_environ({**environ, **variables})
    if args.timeline_mark_cycles == "1" and not config.timeline:
        raise ConfigError("--timeline-mark-cycles needs --timeline-filename")
    if args.debug_rank is not None:
        names = {entry.name: entry.variable for entry in settings()}
        unset = [name for name in PATIENCE if name not in config.given]
        variables |= {names[name]: PATIENCE[name] for name in unset}
    launcher = SSH if elastic else _launcher(args, config, allocation, environ)
    allocation = _usable(allocation, launcher)
    if launcher != MPIRUN and allocation is not None:
        hosts = _with_ranks(allocation, args.num_proc)  # The agents must know them.
    if elastic and allocation is not None:
        hosts = allocation.hosts  # Those without a rank at the start take part when others fail.
    if args.gloo:
        variables["HVDLITE_TRANSPORT"] = "tcp"
    num_proc = args.num_proc or _default_num_proc(args, hosts, allocation)
    if torch_pod:
        num_proc = torch_pod.ranks_per_pod
    options = LaunchOptions(
        launcher=launcher,
        command=tuple(args.command),
        num_proc=num_proc,
        torch_pod=torch_pod,
        hosts=hosts,
        allocation=allocation,
        variables=variables,
        start_timeout_seconds=config.start_timeout_seconds,
        ssh_args=pod.ssh_args if pod else (),
        launcher_pod=pod,
        network_interfaces=config.network_interfaces,
        peer_timeout_seconds=config.peer_timeout_seconds,
        check_hosts=not args.no_check_hosts,
        mpi_args=words_of(args.mpi_args or "", "--mpi-args"),
        binding_args=words_of(args.binding_args or "", "--binding-args"),
        notes=tuple(notes),
        elastic=elastic_options(args, config, num_proc) if elastic else None,
        cluster=cluster_options(args, config, launcher, elastic, torch_pod is not None),
        live=live,
        **{name: getattr(args, name) for name in AS_GIVEN},
    )
    _check(options, config)
    return options


def _launcher(
    args: argparse.Namespace, config: Config, allocation: Allocation | None,
    environ: Mapping[str, str],
) -> str:  # fmt: skip
    given = {
        "--mpi": args.mpi,
        "--gloo": args.gloo,
        "--mpi-args": args.mpi_args is not None,
        "--binding-args": args.binding_args is not None,
    }
    return choose_launcher(config, given, allocation, environ)


def _hosts(args: argparse.Namespace, pod: LauncherPod | None) -> tuple[Host, ...]:
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if args.hostfile is not None:
        return read_hostfile(args.hostfile)
    if pod is not None and args.host_discovery_script is None:
        return with_own_pod_local(read_hostfile(pod.hostfile, pod.source), socket.gethostname())
    return ()


def _hosts_of(allocation: Allocation | None, num_proc: int | None) -> tuple[Host, ...]:
    """Return the hosts of an allocation that get ranks; none under Slurm: srun knows them."""
    if allocation is None or allocation.system == SLURM:
        return ()
    return _with_ranks(allocation, num_proc)


def _usable(allocation: Allocation | None, launcher: str) -> Allocation | None:
    """Return the allocation without the launch node, where jsrun starts the ranks."""
    if allocation is None or launcher != JSRUN:
        return allocation
    return replace(allocation, hosts=compute_hosts(allocation.hosts))


def _with_ranks(allocation: Allocation, num_proc: int | None) -> tuple[Host, ...]:
    counts = ranks_per_host(allocation.hosts, num_proc or allocation.slots)
    return tuple(host for host, count in zip(allocation.hosts, counts, strict=True) if count)


def _default_num_proc(
    args: argparse.Namespace, hosts: tuple[Host, ...], allocation: Allocation | None
) -> int:
    if args.host_discovery_script is not None:
        return args.min_np or 1
    if hosts:
        number = sum(host.slots for host in hosts)
    else:
        number = allocation.slots if allocation else cores()
    return min(number, args.max_np or number)


def _variables(
    args: argparse.Namespace, environ: Mapping[str, str], notes: list[str]
) -> dict[str, str]:
    """Return the variables by which flags win over the config file, and it over `environ`."""
    if args.network_interface:  # Is written as --network-interfaces.
        if args.network_interfaces is not None:
            raise ConfigError(
                "--network-interface contradicts --network-interfaces: give one of them"
            )
        args.network_interfaces = ",".join(args.network_interface)
    given = {}
    for entry in settings():
        text = getattr(args, entry.name, None)
        if text is not None and entry.flag:
            given[entry.name] = entry.variable_text(text, entry.flag)
    flags = {entry.name: entry.flag for entry in settings()}
    for first, second in CONTRADICTIONS:
        if given.get(first) == "1" and second in given:
            raise ConfigError(f"{flags[first]} contradicts {flags[second]}: give one of them")
    path = args.config_file
    values = read_config_file(path, notes) if path is not None else {}
    values |= _winning(given, values)
    set_before = [each.name for each in settings() if any(map(environ.get, each.variables))]
    values = _winning(values, set_before)
    return {entry.variable: values[entry.name] for entry in settings() if entry.name in values}


def _winning(given: Mapping[str, str], others: Collection[str]) -> dict[str, str]:
    """Return what is `given`, and what makes it win over `others` that say the opposite."""
    more = {}
    if given.get("hierarchical_allreduce") == "1":
        more = dict.fromkeys(("allreduce", "device_allreduce"), "hierarchical")
    if not given.keys().isdisjoint(("stall_warning_seconds", "stall_shutdown_seconds")):
        more["stall_check_disable"] = "0"
    return {name: text for name, text in more.items() if name in others} | dict(given)


def _check(options: LaunchOptions, config: Config) -> None:
    local_ranks = max(options.counts)  # raises when there are too few slots
    affinity = config.thread_affinity
    if affinity and len(affinity) < local_ranks:
        raise ConfigError(
            f"--thread-affinity names {len(affinity)} cores, and a host has {local_ranks} ranks: "
            "name one core for each local rank"
        )
    if options.torch_pod is not None and options.launcher != SSH:
        raise ConfigError(
            f"--launcher {options.launcher}: in the pods of a torch policy of Kubeflow Trainer "
            "(PET_NNODES) each pod starts its own ranks: leave out --launcher and flags of MPI"
        )
    if options.debug_rank is not None:
        check_debug_rank(options.debug_rank, options.size, options.hosts)
    if options.binding_args and flags_in(options.mpi_args) & BINDING_FLAGS:
        raise ConfigError("--binding-args contradicts --mpi-args, which binds ranks, too")
    if options.launcher != MPIRUN and flags_in(options.binding_args) - AGENT_BINDING_FLAGS:
        raise ConfigError(
            f"--binding-args={' '.join(options.binding_args)!r}: agents know --bind-to core and "
            "--bind-to none; --launcher mpirun passes on any other"
        )
    if options.launcher in GROUPS and (options.ssh_port or options.ssh_identity_file):
        raise ConfigError(
            f"--ssh-port and --ssh-identity-file: {options.launcher} does not use ssh"
        )
    identity = options.ssh_identity_file
    if identity is not None and not Path(identity).is_file():
        raise ConfigError(f"--ssh-identity-file: there is no file {identity}")
