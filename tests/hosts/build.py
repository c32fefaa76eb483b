"""Makes a lab: namespaces, bridges, keys and files, and an sshd in each host."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from hvdlite.launcher.processes.signals import die_with_parent
from tests.hosts.lab import (
    CACHE,
    DOMAIN,
    HOME,
    HOSTS,
    INSIDE,
    NETWORKS,
    READY_SECONDS,
    CannotBuildError,
    Lab,
    Node,
    address,
    address6,
    child_of,
    do,
    environment,
    kept_paths,
    program,
)

PROGRAMS = ("ip", "unshare", "nsenter", "mount", "ssh", "ssh-keygen", "sshd")
SSHD_CONFIG = f"""\
Port 22
HostKey {INSIDE}/{{name}}/host_key
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
StrictModes no
MaxStartups 100
AuthorizedKeysFile {HOME}/.ssh/authorized_keys
"""
# Waits for a line, which says that the network is there. The binds stand aside while the folders
# that they lie in are hidden.
BOOT = """\
set -e
hostname {name}
mount --make-rprivate /
mount -t tmpfs -o mode=755 lab /mnt
{stand_aside}
mount -t tmpfs -o mode=1777 lab /tmp
mount -t tmpfs -o mode=1777 lab /dev/shm
mount -t tmpfs -o mode=755 lab /run
mkdir -p /run/sshd {home} {inside}
mount --move /mnt/lab {inside}
{come_back}
mkdir /mnt/cgroup
mount --rbind /sys/fs/cgroup /mnt/cgroup
mount -t sysfs lab /sys
mount --move /mnt/cgroup /sys/fs/cgroup
umount /mnt
mount --bind {inside}/{name}/home {home}
mount --bind {inside}/{name}/hosts /etc/hosts
mount --bind {inside}/passwd /etc/passwd
mount -t proc lab /proc
mount --bind {inside}/{name}/boot_id /proc/sys/kernel/random/boot_id
read -r go
exec {sshd} -D -e -f {inside}/{name}/sshd_config
"""


def build() -> Lab:
    """Make a lab; raises `CannotBuildError` where that is not possible."""
    missing = [name for name in PROGRAMS if program(name) is None]
    if os.geteuid() != 0 or missing:
        raise CannotBuildError(f"needs root and {', '.join(missing or PROGRAMS)}")
    folder = Path(tempfile.mkdtemp(prefix="hvdlite-lab-"))
    lab = Lab(folder, _start(["unshare", "--net", "sleep", "infinity"]))
    try:
        _wait_until(lambda: _network(lab.hub.pid) != _network(os.getpid()), lab.hub, "a network")
        _write_common(folder)
        for number, name in enumerate(HOSTS, start=1):
            lab.nodes[name] = _boot(folder, name, number)
        for node in lab.nodes.values():
            _wait_until(lambda node=node: _find_pid(node), node.outer, "namespaces", node.folder)
        _connect(lab)
        for node in lab.nodes.values():
            assert node.outer.stdin is not None
            node.outer.stdin.write(b"go\n")
            node.outer.stdin.close()
        for node in lab.nodes.values():
            _wait_until(lambda node=node: listens(node.pid, 22), node.outer, "sshd", node.folder)
    except BaseException:
        lab.close()
        raise
    return lab


def _write_common(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "shared").mkdir(mode=0o777)
    entries = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    name = pwd.getpwuid(0).pw_name
    for entry in entries:
        if entry[0] == name:
            entry[5:7] = [str(HOME), "/bin/sh"]
    (folder / "passwd").write_text("".join(":".join(entry) + "\n" for entry in entries))
    for key in ("user_key", *(f"{host}_key" for host in HOSTS)):
        do(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)])


def _boot(folder: Path, name: str, number: int) -> Node:
    own = folder / name
    for path in (own, own / "home", own / "home" / ".ssh"):
        path.mkdir(mode=0o700)
    if CACHE.is_dir():
        shutil.copytree(CACHE, own / "home" / ".cache" / CACHE.name)
    shutil.copy(folder / f"{name}_key", own / "host_key")
    (own / "host_key").chmod(0o600)
    (own / "sshd_config").write_text(SSHD_CONFIG.format(name=name))
    (own / "boot_id").write_text(f"{uuid.uuid4()}\n")
    names = [f"{address(host)} {host}{end}\n" for host in HOSTS for end in ("", f".{DOMAIN}")]
    (own / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{''.join(names)}")
    _write_ssh_files(folder, own / "home" / ".ssh")
    kept = kept_paths()
    aside = [_bind(str(folder), "/mnt/lab")]
    aside += [_bind(path, f"/mnt/{at}") for at, path in enumerate(kept)]
    back = [
        f"mkdir -p {shlex.quote(path)}; mount --move /mnt/{at} {shlex.quote(path)}"
        for at, path in enumerate(kept)
    ]
    (own / "boot").write_text(BOOT.format(
        name=name, inside=INSIDE, home=HOME, sshd=program("sshd"),
        stand_aside="\n".join(aside), come_back="\n".join(back),
    ))  # fmt: skip
    spaces = ["--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child"]
    log = (own / "log").open("wb")
    with log:
        outer = _start(["unshare", *spaces, "sh", str(own / "boot")], stderr=log.fileno())
    return Node(name, number, own, outer)


def _write_ssh_files(folder: Path, home: Path) -> None:
    for source, name in (("user_key", "id_ed25519"), ("user_key.pub", "authorized_keys")):
        shutil.copy(folder / source, home / name)
        (home / name).chmod(0o600)
    lines = []
    for host in HOSTS:
        names = [host, f"{host}.{DOMAIN}"]
        names += [each(host, network) for each in (address, address6) for network in NETWORKS]
        kind, key = (folder / f"{host}_key.pub").read_text().split()[:2]
        lines.append(f"{','.join(names)} {kind} {key}\n")
    (home / "known_hosts").write_text("".join(lines))


def _bind(source: str, target: str) -> str:
    return f"mkdir {target}; mount --bind {shlex.quote(source)} {target}"


def _connect(lab: Lab) -> None:
    """Give each host eth0 and eth1 on the two bridges of the hub."""
    lines = [
        line for network in NETWORKS
        for line in (f"link add br{network} type bridge", f"link set br{network} up")
    ]  # fmt: skip
    for node in lab.nodes.values():
        for net in NETWORKS:
            end = f"{node.name}{net}"
            lines += [
                f"link add {end} type veth peer name eth{net} netns {node.pid}",
                f"link set {end} master br{net} up",
            ]
    lab.ip("hub", *lines)
    for node in lab.nodes.values():
        lines = ["link set lo up"]
        for net in NETWORKS:
            lines += [
                f"addr add {address(node.name, net)}/24 dev eth{net}",
                f"link set eth{net} up",
            ]
            if os.path.exists("/proc/net/if_inet6"):
                lines += [f"addr add {address6(node.name, net)}/64 dev eth{net} nodad"]
        lab.ip(node.name, *lines)


def _find_pid(node: Node) -> bool:
    """Find the first process of a host, once it has namespaces of its own."""
    node.pid = child_of(node.outer) or 0
    return node.pid > 0


def _network(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _wait_until(
    there: Callable[[], bool],
    process: subprocess.Popen[bytes],
    what: str,
    folder: Path | None = None,
) -> None:
    """Wait for what a process makes; raises `CannotBuildError` with what it has logged."""
    deadline = time.monotonic() + READY_SECONDS
    while not there():
        if process.poll() is not None or time.monotonic() > deadline:
            said = (folder / "log").read_text(errors="replace").strip() if folder else ""
            raise CannotBuildError(f"{what} may not be had here: {said}")
        time.sleep(0.005)


def listens(pid: int, port: int) -> bool:
    """Return whether something listens on a port, in the network of a process."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    states = {(int(line.split()[1].rpartition(":")[2], 16), line.split()[3]) for line in lines}
    return (port, "0A") in states


def _start(command: list[str], stderr: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr,
        env=environment({}), start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509 - it makes one system call
    )  # fmt: skip
