"""Jobs in the pods of an MPIJob: real sshd without root, names of DNS, the operator's variables."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.hosts.lab import SHARED, Lab, Running
from tests.hosts.pods import add_names, pod, worker, write_job
from tests.launcher.platforms.test_kubernetes import MPICH_POD, OPENMPI_POD, TRAINER_POD

RUN = (sys.executable, "-m", "hvdlite.launcher")
FQDN = "train.default.svc"
NAMES = {f"train-worker-{n}.{FQDN}": host for n, host in enumerate(("nodeb", "nodec"))}
HOSTFILES = {
    "openmpi": "".join(f"{name} slots=2\n" for name in NAMES),
    "mpich": "".join(f"{name}:2\n" for name in NAMES),
}
# Fits a line by gradient descent: each rank has a point of its own, and only all of them tell it.
TRAIN = """\
import os, socket
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
x = np.full(1, 2 * hvd.rank() / (hvd.size() - 1) - 1)
weight, bias = np.zeros(1), np.zeros(1)
for step in range(30):
    error = weight * x + bias - (3 * x - 1)
    gradient = hvd.allreduce(np.concatenate([error * x, error]), name="gradient")
    weight, bias = weight - gradient[:1], bias - gradient[1:]
words = ["trained", hvd.rank(), hvd.size(), socket.gethostname(), os.getuid(), hvd.local_size(),
         f"{weight[0]:.2f} {bias[0]:.2f}", os.environ.get("K_MPI_JOB_ROLE"), os.environ["MINE"]]
# In one piece: ranks that torchrun starts share a pipe.
os.write(1, (" ".join(map(str, words)) + "\\n").encode())
hvd.shutdown()
"""


def trained(text: str) -> list[str]:
    return sorted(re.findall(r"trained (.*)", text))


def expected(*hosts: str) -> list[str]:
    """Ranks in the order of their hosts, two on each; all have learnt the line."""
    size = 2 * len(hosts)
    return [f"{rank} {size} {hosts[rank // 2]} 1000 2 3.00 -1.00 None yes" for rank in range(size)]


either_launcher = pytest.mark.parametrize("flag", ["--launcher=mpirun", "--launcher=ssh"])


@contextlib.contextmanager
def workers(lab: Lab, names: dict[str, str] = NAMES) -> Iterator[None]:
    """Run both workers; of their names, only `names` have an address."""
    write_job(lab, names)
    lab.write("train.py", TRAIN)
    with contextlib.ExitStack() as stack:
        for name, host in NAMES.items():
            stack.enter_context(worker(lab, host, name.partition(".")[0]))
        yield


@contextlib.contextmanager
def launcher(
    lab: Lab, environ: dict[str, str], hostfile: str, *flags: str, name: str = "train-launcher"
) -> Iterator[Running]:
    words = (*RUN, *flags, sys.executable, f"{SHARED}/train.py")
    with pod(lab, "nodea", name, *words, hostfile=hostfile, MINE="yes", **environ) as running:
        yield running


@pytest.mark.parametrize(
    ("environ", "form", "flag"),
    [
        (OPENMPI_POD, "openmpi", "--launcher=mpirun"),
        (TRAINER_POD, "openmpi", "--launcher=ssh"),
        (MPICH_POD, "mpich", "--launcher=ssh"),
    ],
    ids=["openmpi", "trainer", "mpich"],
)
def test_ranks_train_in_the_workers(
    lab: Lab, environ: dict[str, str], form: str, flag: str
) -> None:  # fmt: skip
    with workers(lab), launcher(lab, environ, HOSTFILES[form], flag) as running:
        done = running.finish()
    assert done.returncode == 0, done
    assert trained(done.stdout) == expected("train-worker-0", "train-worker-1")
    assert "4 ranks on the hosts of /etc/mpi/hostfile" in done.stderr


def test_a_launcher_that_is_a_worker_runs_ranks_itself(lab: Lab) -> None:
    """Its pod has no sshd, so that ssh to its own name would fail."""
    hostfile = f"train-launcher.{FQDN} slots=2\n{HOSTFILES['openmpi']}"
    with workers(lab), launcher(lab, OPENMPI_POD, hostfile, "--launcher=ssh") as running:
        done = running.finish()
    assert done.returncode == 0, done
    hosts = ("train-launcher", "train-worker-0", "train-worker-1")
    assert [line.split()[:3] for line in trained(done.stdout)] == [
        line.split()[:3] for line in expected(*hosts)
    ]


def test_a_launcher_that_comes_first_waits_for_the_workers(lab: Lab) -> None:
    first, second = NAMES.items()
    with workers(lab, dict([first])), launcher(lab, OPENMPI_POD, HOSTFILES["openmpi"]) as running:
        assert running.process.stderr is not None
        waits = next(line for line in running.process.stderr if "waiting up to" in line)
        assert waits.endswith(f"for an address of {second[0]}\n")
        add_names(lab, dict([second]))
        done = running.finish()
    assert done.returncode == 0, done
    assert trained(done.stdout) == expected("train-worker-0", "train-worker-1")


@either_launcher
def test_a_rank_that_fails_in_a_worker_ends_the_job(lab: Lab, flag: str) -> None:
    with workers(lab):
        lab.write("train.py", "import os, time\nif os.environ['HVDLITE_RANK'] == '3': os._exit(7)\n"
                              "time.sleep(1000)\n")  # fmt: skip
        with launcher(lab, OPENMPI_POD, HOSTFILES["openmpi"], flag) as running:
            done = running.finish()
    assert done.returncode == 7, done
    assert "rank 3 failed with exit code 7" in done.stderr.splitlines()[-1]


@either_launcher
def test_a_launcher_pod_that_is_deleted_ends_the_ranks(lab: Lab, flag: str) -> None:
    with workers(lab):
        lab.write("train.py", "import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
        with launcher(lab, OPENMPI_POD, HOSTFILES["openmpi"], flag) as running:
            assert running.process.stdout is not None
            for _ in range(4):
                assert running.process.stdout.readline().endswith("up\n")
            running.signal(signal.SIGTERM)
            assert running.finish().returncode == 128 + signal.SIGTERM
