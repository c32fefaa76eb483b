"""Checkpoints of DTensors on real ranks, by one import of PyTorch.

They are saved by 4, and loaded by 2, by 1 and without any group. Where a rank is killed while it
saves, the one before can be loaded: by `hvd.checkpoint.save`, which replaces the checkpoint of the
same name when all is written, and by `torch.distributed.checkpoint.save` itself, into a folder of
its own for each checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.parallel.jobs import Job, Jobs

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

SIZE = 3
VICTIM = 1
KILLS = [("hvd", "prepare_local_plan"), ("hvd", "write_data"), ("dcp", "write_data")]
PRELOAD = (
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor"),
    "tests.parallel.worker_checkpoint",
)
PROGRAM = """
import os, signal, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import hvdlite.torch as hvd

by, where, folder = sys.argv[1:]
hvd.init_process_group()
mesh = init_device_mesh("cpu", (hvd.size(),))

def save(number):
    values = torch.arange(12.0).reshape(6, 2) + 100 * number
    state = {"w": distribute_tensor(values, mesh, [Shard(0)])}
    if by == "hvd":
        hvd.checkpoint.save(os.path.join(folder, "it"), state)
    else:
        dcp.save(state, checkpoint_id=os.path.join(folder, str(number)))

save(0)
if hvd.rank() == int(os.environ["VICTIM"]):
    kill = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    setattr(FileSystemWriter, where, kill)
try:
    save(1)
except BaseException as error:
    sys.stdout.write(f"rank {hvd.rank()} heard: {type(error).__name__}: {error}\\n")
    sys.stdout.flush()
    assert isinstance(error, hvd.HorovodInternalError) or by == "dcp", error
    sys.exit(3)
sys.stdout.write("saved all the same\\n")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Jobs:
    worker = (sys.executable, "-m", "tests.parallel.worker_checkpoint")
    found = {
        "save": Job(4, (*worker, "save", str(folder), "2")),
        "load": Job(2, (*worker, "load", str(folder), "2")),
    }
    for by, where in KILLS:
        place = folder / f"{by}, {where}"
        place.mkdir()
        words = (sys.executable, "-c", PROGRAM, by, where, str(place))
        found[place.name] = Job(SIZE, words, {"VICTIM": str(VICTIM)})
    return Jobs(found, PRELOAD, seconds=200)


@pytest.mark.parametrize(("name", "size"), [("save", 4), ("load", 2)])
def test_dtensors_of_four_ranks_become_those_of_two(name: str, size: int, jobs: Jobs) -> None:
    result = jobs.result(name)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout


def test_dtensors_of_four_ranks_become_plain_tensors(folder: Path, jobs: Jobs) -> None:
    import hvdlite.torch as hvd

    jobs.result("save")
    expected = {"0.weight": torch.zeros(10, 6)}
    hvd.checkpoint.load(folder / "whole", expected)
    plain = {"model": {"0.weight": torch.zeros(10, 6)}, "step": 0}
    hvd.checkpoint.load(folder / "dcp", plain)
    assert torch.equal(plain["model"]["0.weight"], expected["0.weight"])
    assert plain["step"] == 11
    hvd.checkpoint.consolidate(folder / "dcp", folder / "one")
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "step": 0}
    for name in ("dcp", "one"):
        model[0].weight.data.zero_()
        hvd.checkpoint.load(folder / name, state)
        assert torch.equal(model[0].weight, expected["0.weight"])
        assert state["optimizer"].state[model[0].weight]["exp_avg"].abs().sum() > 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("by", "where"), KILLS)
def test_a_rank_that_is_killed_while_it_saves(
    by: str, where: str, folder: Path, jobs: Jobs
) -> None:
    done = jobs.result(f"{by}, {where}")
    place = folder / f"{by}, {where}"
    assert done.returncode != 0 and "saved all the same" not in done.stdout, done.stdout
    heard = [line for line in done.stdout.splitlines() if " heard: " in line]
    assert len(heard) == SIZE - 1, done.stdout
    assert f"rank {VICTIM} is gone" in done.stdout or f"rank {VICTIM} was lost" in done.stdout
    values = {"w": torch.zeros(6, 2)}
    if by == "hvd":
        import hvdlite.torch as hvd

        hvd.checkpoint.load(place / "it", values)
        assert [path.name for path in place.iterdir()] == ["it"]
    else:
        import torch.distributed.checkpoint as dcp

        dcp.load(values, checkpoint_id=os.path.join(place, "0"), no_dist=True)
        # What is not whole does not look so.
        with pytest.raises(BaseException, match=r"\.metadata"):
            dcp.load(values, checkpoint_id=os.path.join(place, "1"), no_dist=True)
    assert torch.equal(values["w"], torch.arange(12.0).reshape(6, 2))
