"""Pods of Kubernetes in the simulated hosts: what an MPIJob gives to its containers.

A pod is a process in a host of the lab, with a hostname, an /etc, a /home and capabilities of its
own: an ordinary user, as in the image of deploy/kubernetes, whose files for ssh it has. The key of
the job is mounted as the MPI operator mounts it: it belongs to root, and everybody may read it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.hosts.build import listens
from tests.hosts.lab import CACHE, ROOT, SHARED, Lab, Running, address, do
from tests.hosts.lab import HOME as LAB_HOME

FILES = ROOT / "deploy" / "kubernetes"
USER, UID = "mpiuser", 1000
HOME = f"/home/{USER}"
KEYS = f"{HOME}/.ssh"
SSH_PORT = 2222
KEY_FILES = ("id_rsa", "id_rsa.pub", "authorized_keys")
# What the entry point of the worker pods runs: its last word is the file of deploy/kubernetes.
SSHD = ("/usr/sbin/sshd", "-De", "-f", f"{HOME}/.sshd_config")
READY_SECONDS = 20.0
BOOT = """\
set -e
hostname {name}
mount --make-rprivate /
mount -t tmpfs -o mode=755 pod /home
mount -t tmpfs -o mode=755 pod /mnt
mkdir -p {home} /mnt/etc
cp -a /etc/. /mnt/etc
rm -f /mnt/etc/hosts
ln -s {shared}/hosts /mnt/etc/hosts
grep -v ':{uid}:' /etc/passwd >/mnt/etc/passwd
echo '{user}:x:{uid}:{uid}::{home}:/bin/bash' >>/mnt/etc/passwd
mkdir -p /mnt/etc/ssh/ssh_config.d /mnt/etc/mpi
cp {files}/ssh_config /mnt/etc/ssh/ssh_config.d/hvdlite.conf
{hostfile}
mount --bind /mnt/etc /etc
cp {files}/sshd_config {home}/.sshd_config
[ ! -d {cache} ] || {{ mkdir {home}/.cache; cp -r {cache} {home}/.cache; }}
chown -R {uid}:{uid} {home}
mkdir {keys}
mount -t tmpfs -o mode=1777 pod {keys}
for name in {key_files}; do
    install -o root -g root -m 644 {shared}/keys/$name {keys}/$name
done
{open_doors}
cd {home}
exec setpriv --reuid {uid} --regid {uid} --clear-groups --no-new-privs \
    --bounding-set -all --inh-caps -all "$@"
"""


def write_job(lab: Lab, names: dict[str, str]) -> None:
    """Write what the pods of one job share: a key, and the names of hosts with their addresses."""
    keys = lab.folder / "shared" / "keys"
    keys.mkdir(exist_ok=True)
    if not (keys / "id_rsa").exists():
        kind = ["-t", "ecdsa", "-b", "521"]
        do(["ssh-keygen", "-q", *kind, "-N", "", "-f", str(keys / "id_rsa")])
        (keys / "authorized_keys").write_text((keys / "id_rsa.pub").read_text())
    lab.write("hosts", "127.0.0.1 localhost\n")
    add_names(lab, names)


def add_names(lab: Lab, names: dict[str, str]) -> None:
    """Let the pods resolve further names, each to the address of a host of the lab."""
    with (lab.folder / "shared" / "hosts").open("a") as file:
        for name, host in names.items():
            file.write(f"{address(host)} {name} {name.partition('.')[0]}\n")


@contextlib.contextmanager
def pod(
    lab: Lab, host: str, name: str, *command: str, hostfile: str = "", **variables: str
) -> Iterator[Running]:
    """Run a command in a pod of this name; `hostfile` is that of a launcher pod."""
    mounted = lab.write(f"{name}.hostfile", hostfile)
    boot = BOOT.format(
        name=name, home=HOME, shared=SHARED, user=USER, uid=UID, files=shlex.quote(str(FILES)),
        cache=LAB_HOME / ".cache" / CACHE.name,
        keys=KEYS, key_files=" ".join(KEY_FILES), open_doors="\n".join(_open_doors()),
        hostfile=f"install -m 444 {mounted} /mnt/etc/mpi/hostfile" if hostfile else "",
    )  # fmt: skip
    path = lab.write(f"{name}.boot", boot)
    words = ["unshare", "--uts", "--mount", "sh", path, *command]
    with lab.start(host, *words, HOME=HOME, **variables) as running:
        yield running


@contextlib.contextmanager
def worker(lab: Lab, host: str, name: str) -> Iterator[Running]:
    """Run the ssh server of a worker pod, from when it can be reached."""
    with pod(lab, host, name, *SSHD, K_MPI_JOB_ROLE="worker") as running:
        deadline = time.monotonic() + READY_SECONDS
        while not listens(lab.nodes[host].pid, SSH_PORT):
            if running.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no sshd in {name}: {running.process.communicate()}")
            time.sleep(0.01)
        yield running


def _open_doors() -> Iterator[str]:
    """Show Python and the checkout to an ordinary user, where a folder on the way is private."""
    paths = [Path(path).resolve() for path in (sys.base_prefix, sys.prefix, ROOT)]
    closed = {path: door for path in paths if (door := _closed_door(path)) is not None}
    for number, path in enumerate(closed):
        yield f"mkdir /mnt/{number}; mount --bind {shlex.quote(str(path))} /mnt/{number}"
    for door in dict.fromkeys(closed.values()):
        yield f"mount -t tmpfs -o mode=755 pod {shlex.quote(str(door))}"
    for number, path in enumerate(closed):
        quoted = shlex.quote(str(path))
        yield f"mkdir -p {quoted}; mount --move /mnt/{number} {quoted}"


def _closed_door(path: Path) -> Path | None:
    """Return the first folder on the way to `path` that others than its owner may not enter."""
    parents: Sequence[Path] = [*reversed(path.parents)]
    return next((door for door in parents if not os.stat(door).st_mode & stat.S_IXOTH), None)
