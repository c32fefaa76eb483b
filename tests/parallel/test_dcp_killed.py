"""A rank is killed while PyTorch's distributed checkpoint is saved: the one before can be loaded.

By `hvd.checkpoint.save`, which replaces the checkpoint of the same name when all is written, and
by `torch.distributed.checkpoint.save` itself, into a folder of its own for each checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.parallel.jobs import ranks, run_command

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

SIZE = 3
VICTIM = 1
PRELOAD = (
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor"),
    "hvdlite.torch",
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("by", "where"), [("hvd", "prepare_local_plan"), ("hvd", "write_data"), ("dcp", "write_data")]
)
def test_a_rank_that_is_killed_while_it_saves(by: str, where: str, tmp_path: Path) -> None:
    words = (sys.executable, "-c", PROGRAM, by, where, str(tmp_path))
    command = ranks(SIZE, *words, preload=PRELOAD)
    done = run_command(command, timeout=200, VICTIM=str(VICTIM))
    assert done.returncode != 0 and "saved all the same" not in done.stdout, done.stdout
    heard = [line for line in done.stdout.splitlines() if " heard: " in line]
    assert len(heard) == SIZE - 1, done.stdout
    assert f"rank {VICTIM} is gone" in done.stdout or f"rank {VICTIM} was lost" in done.stdout
    values = {"w": torch.zeros(6, 2)}
    if by == "hvd":
        import hvdlite.torch as hvd

        hvd.checkpoint.load(tmp_path / "it", values)
        assert [path.name for path in tmp_path.iterdir()] == ["it"]
    else:
        import torch.distributed.checkpoint as dcp

        dcp.load(values, checkpoint_id=os.path.join(tmp_path, "0"), no_dist=True)
        # What is not whole does not look so.
        with pytest.raises(BaseException, match=r"\.metadata"):
            dcp.load(values, checkpoint_id=os.path.join(tmp_path, "1"), no_dist=True)
    assert torch.equal(values["w"], torch.arange(12.0).reshape(6, 2))
