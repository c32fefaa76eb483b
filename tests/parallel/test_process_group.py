"""torch.distributed over hvdlite, on real ranks: many features in one job for each number of ranks.

What each feature does, and its oracle, is in tests/parallel/process_group.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.parallel import jobs

pytest.importorskip("torch", reason="the extra 'torch' is not installed")

FOLDER = Path(__file__).parent / "process_group"
PYTORCH_OWN = (
    sys.executable, "-W", "ignore", "-m", "tests.parallel.process_group.pytorch_own"
)  # fmt: skip
# PyTorch's tests that want more ranks than 4: a collective in a group that is a part of them.
SUBGROUPS = [
    *("all_gather", "all_gather_coalesced", "all_to_all", "all_to_all_single_equal_split"),
    *("all_to_all_single_unequal_split", "barrier", "barrier_timeout", "broadcast", "gather"),
    "scatter",
]
REDUCTIONS = ["all_reduce", "all_reduce_coalesced", "reduce"]
FEATURE = re.compile(r"^@feature\(([\d, ]*)\)\ndef (\w+)", re.MULTILINE)


def features(size: int) -> list[str]:
    """The features of a job, without the many modules of torch that they import."""
    return [
        name
        for path in sorted(FOLDER.glob("check_*.py"))
        for sizes, name in FEATURE.findall(path.read_text())
        if str(size) in (sizes or "4").split(", ")
    ]


class Results:
    """What jobs of 4 and of 2 ranks have found; they run when the first test asks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # Where the first job leaves checkpoints for the second.
        self._output = ""

    def output(self) -> str:
        if not self._output:
            program = [sys.executable, "-m", "tests.parallel.process_group.fork_ranks"]
            result = jobs.run_command(
                [*program, "4", "2", "killed"], timeout=220, CHECKPOINT=str(self.folder)
            )
            self._output = result.stdout
            assert result.returncode == 0, result.stdout
        return self._output

    def of(self, size: int, name: str) -> str:
        start = f"FEATURE {size} {name} "
        lines = (line for line in self.output().splitlines() if line.startswith(start))
        return next(lines, self._output).removeprefix(start)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in (4, 2) for name in features(size)]
)
def test_feature(results: Results, size: int, name: str) -> None:
    text = results.of(size, name)
    if text.startswith("skip: "):
        pytest.skip(text)
    assert text == "ok", text.replace("\\n", "\n")


def test_a_checkpoint_of_four_ranks_without_a_process_group(results: Results) -> None:
    """As by one process that serves the model."""
    results.of(4, "checkpoint_of_four_ranks_for_later")
    program = (
        "import torch\n"
        "from torch.distributed import checkpoint\n"
        "from tests.parallel.process_group.check_checkpoints import tensors\n"
        "state = {name: torch.zeros_like(t) for name, t in tensors().items()}\n"
        f"checkpoint.load(state, checkpoint_id={str(results.folder / 'dcp')!r}, no_dist=True)\n"
        "assert all(torch.equal(state[name], t) for name, t in tensors().items())\n"
    )
    command = [sys.executable, "-c", program]
    result = jobs.run_command(command, timeout=60, preload=("torch.distributed",))
    assert result.returncode == 0, result.stdout


def test_under_torchrun() -> None:
    """torchrun tells rank and address; ``env://`` is torch's default."""
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    command = [*([torchrun] if torchrun else [sys.executable, "-m", "torch.distributed.run"])]
    command += ["--nproc-per-node", "2", "--no-python", sys.executable]
    program = (
        "import torch, torch.distributed as dist, hvdlite.torch as hvd\n"
        "dist.init_process_group('hvdlite')\n"
        "t = torch.ones(3); dist.all_reduce(t); assert t.tolist() == [2.0] * 3\n"
        "assert hvd.size() == 2 and hvd.rank() == dist.get_rank()\n"
        "dist.destroy_process_group(); print('is done')\n"
    )
    result = jobs.run_command([*command, "-W", "ignore", "-c", program], timeout=60)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is done") == 2


@pytest.mark.parametrize(
    ("flags", "imported", "method", "said"),
    [
        (["--torchrun-env"], "import hvdlite.torch", "", "of [2.0]"),
        ([], "import hvdlite.torch", "hvdlite://", "of [2.0]"),
        ([], "import hvdlite.torch", "", "environment variable RANK expected, but not set"),
        (["--torchrun-env"], "", "", "Unknown backend type hvdlite"),
        ([], "", "hvdlite://", "No rendezvous handler for hvdlite://"),
    ],
)
def test_under_hvdlite_run_as_docs_sharding_says(
    flags: list[str], imported: str, method: str, said: str
) -> None:
    assert said.startswith("of") or said in (jobs.ROOT / "docs" / "sharding.md").read_text()
    program = (
        f"import torch, torch.distributed as dist\n{imported}\n"
        f"dist.init_process_group('hvdlite', init_method={method or None!r})\n"
        "t = torch.ones(1); dist.all_reduce(t); print('of', t.tolist())\n"
        "dist.destroy_process_group()\n"
    )
    words = ["-np", "2", *flags, sys.executable, "-c", program]
    command = [sys.executable, "-m", "hvdlite.launcher", *words]
    result = jobs.run_command(command, timeout=60, preload=("torch.distributed",))
    assert said in result.stdout
    assert (result.returncode == 0) == said.startswith("of"), result.stdout


def test_a_killed_rank(results: Results) -> None:
    """The others know at once, in whatever they wait for."""
    found = re.findall(r"^KILLED (\d) (\w+) ([\d.]+) (.*)$", results.output(), re.MULTILINE)
    assert sorted(rank for rank, *_ in found) == ["0", "1"], results.output()
    for _, kind, seconds, text in found:
        assert kind in ("HorovodInternalError", "RuntimeError"), found
        assert "rank 2" in text and float(seconds) < 30, found


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_pytorch_own_tests() -> None:
    """What fails is what docs/pytorch_own_tests.md lists with its reason."""
    pytest.importorskip("expecttest", reason="PyTorch's tests need it")
    result = jobs.run_command(jobs.ranks(4, *PYTORCH_OWN), timeout=560)
    assert result.returncode == 0, result.stdout
    failed = re.findall(r"^OWN (\w+) fail", result.stdout, re.MULTILINE)
    page = (jobs.ROOT / "docs" / "pytorch_own_tests.md").read_text()
    assert sorted(failed) == sorted(re.findall(r"^\| `(test_\w+)` \| fails", page, re.MULTILINE))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_pytorch_own_tests_of_subgroups() -> None:
    pytest.importorskip("expecttest", reason="PyTorch's tests need it")
    names = [f"test_{name}_group" for name in SUBGROUPS]
    names += [
        f"test_{name}_group_{op}" for name in REDUCTIONS for op in ("sum", "product", "min", "max")
    ]
    result = jobs.run_command(jobs.ranks(8, *PYTORCH_OWN, *names), timeout=300)
    found = re.findall(r"^OWN (\w+) (.*)$", result.stdout, re.MULTILINE)
    assert dict(found) == dict.fromkeys(names, "pass"), result.stdout
    assert result.returncode == 0, result.stdout
