"""An Indexed Job without a launcher: each pod is a rank, and all meet at the name of the first."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from tests.deploy.test_manifests import of_kind, variables
from tests.hosts.lab import HOSTS, SHARED, Lab, Running
from tests.hosts.pods import add_names, pod, write_job
from tests.hosts.test_pods import TRAIN, trained

SCRIPT = f"print('up', flush=True)\n{TRAIN}"
SIZE = 4


def environment_of(kind: str) -> dict[str, str]:
    """Return what the manifest gives to the container of each rank, with a secret."""
    (manifest,) = of_kind(kind)
    if kind == "JobSet":
        manifest = manifest["spec"]["replicatedJobs"][-1]["template"]
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    given = {name: text for name, text in variables(container).items() if isinstance(text, str)}
    return {**given, "HVDLITE_SECRET": "known to the pods of this job"}


@contextlib.contextmanager
def rank(
    lab: Lab, index: int, command: tuple[str, ...], **environ: str
) -> Iterator[Running]:  # fmt: skip
    """Start the pod of one index; the ranks are spread over the hosts of the lab."""
    host = HOSTS[index * len(HOSTS) // SIZE]
    with pod(
        lab, host, f"train-{index}", *command,
        JOB_COMPLETION_INDEX=str(index), MINE="yes", **environ,
    ) as running:  # fmt: skip
        yield running


def run_ranks_in_pods(lab: Lab, first: str, command: tuple[str, ...], **environ: str) -> list[str]:
    """Start all ranks but the first, then give the first its name; return what they say."""
    write_job(lab, {})
    lab.write("train.py", SCRIPT)
    with contextlib.ExitStack() as stack:
        ranks: list[Running] = [
            stack.enter_context(rank(lab, index, command, **environ)) for index in range(1, SIZE)
        ]
        for running in ranks:
            assert running.process.stdout is not None
            assert running.process.stdout.readline() == "up\n"
        ranks.append(stack.enter_context(rank(lab, 0, command, **environ)))
        add_names(lab, {first: "nodea"})
        done = [running.finish() for running in ranks]
    assert [each.returncode for each in done] == [0] * SIZE, done
    return trained("".join(each.stdout for each in done))


PYTHON = (sys.executable, f"{SHARED}/train.py")
EXPECTED = [f"{index} {SIZE} train-{index} 1000 1 3.00 -1.00 None yes" for index in range(SIZE)]


@pytest.mark.parametrize(
    ("kind", "first"), [("Job", "train-0.train"), ("JobSet", "train-worker-0-0.train")]
)
def test_ranks_meet_at_the_first_pod(lab: Lab, kind: str, first: str) -> None:
    assert run_ranks_in_pods(lab, first, PYTHON, **environment_of(kind)) == EXPECTED


def test_pods_of_trainer_meet_without_torchrun(lab: Lab) -> None:
    """With one rank a pod, the shell maps Trainer's variables, as docs/howto/kubernetes.md says."""
    given = {
        "PET_NNODES": str(SIZE),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29500",
    }
    line = (
        "HVDLITE_SIZE=$PET_NNODES HVDLITE_RENDEZVOUS=$PET_MASTER_ADDR:$PET_MASTER_PORT exec "
        + " ".join(PYTHON)
    )
    said = run_ranks_in_pods(lab, "train-node-0-0.train", ("sh", "-c", line), **given)
    assert said == EXPECTED


def test_torchrun_in_pods_of_trainer(lab: Lab) -> None:
    """Trainer's torch policy: torchrun reads its variables, and starts two ranks in each pod."""
    pytest.importorskip("torch", reason="needs torchrun")
    names = {f"train-node-0-{node}.train": host for node, host in enumerate(("nodeb", "nodec"))}
    write_job(lab, names)
    lab.write("train.py", TRAIN)
    command = (sys.executable, "-m", "torch.distributed.run", f"{SHARED}/train.py")
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(
                pod(
                    lab, host, name.partition(".")[0], *command,
                    PET_NNODES="2", PET_NPROC_PER_NODE="2", PET_NODE_RANK=str(node),
                    PET_MASTER_ADDR=next(iter(names)), PET_MASTER_PORT="29500", MINE="yes",
                )
            )
            for node, (name, host) in enumerate(names.items())
        ]  # fmt: skip
        done = [each.finish(90) for each in running]
    lab.clear()  # of torchrun's own temporary folders
    assert [each.returncode for each in done] == [0, 0], done
    assert trained("".join(each.stdout for each in done)) == [
        f"{rank} 4 train-node-0-{rank // 2} 1000 2 3.00 -1.00 None yes" for rank in range(4)
    ]
