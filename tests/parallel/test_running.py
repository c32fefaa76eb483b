"""The commands of docs/running.md that need one machine start what the page says."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.parallel.jobs import MPIRUN, NO_MPIRUN, run_command
from tests.running_page import PAGE, Block, blocks, check, prepare

LIBRARIES = {"lightning", "accelerate", "submitit"}


def parameters(where: str) -> list[object]:
    """Return the blocks; those that need other libraries run with ``-m libraries`` only."""
    return [
        pytest.param(
            block,
            id=f"{block.number}-{block.code.split()[0]}",
            marks=pytest.mark.libraries if LIBRARIES & {*block.needs} else [],
        )
        for block in blocks(where)
        if " on " not in block.where and " in " not in block.where
    ]


def run(folder: Path, command: str) -> str:
    """Return the output of a command that ends well, in a folder with train.py."""
    variables = prepare(folder)
    words = ["bash", "-euo", "pipefail", "-c", f'cd "{folder}"\n{command}']
    done = run_command(words, timeout=200, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


def skip_without(code: str, *modules: str) -> None:
    if MPIRUN is None and ("mpi" in code):
        pytest.skip(NO_MPIRUN)
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize("block", parameters("run"))
def test_as_many_ranks_meet_as_the_page_says(block: Block, tmp_path: Path) -> None:
    skip_without(block.code, *block.needs)
    check(block, run(tmp_path, block.code))


@pytest.mark.parametrize("block", parameters("script"))
def test_a_script_prints_what_the_page_says(block: Block, tmp_path: Path) -> None:
    skip_without(block.code)
    (tmp_path / "script.py").write_text(block.code)
    output = run(tmp_path, block.command).splitlines()
    assert sorted(line for line in output if line in block.prints) == sorted(block.prints), output


@pytest.mark.parametrize("block", parameters("fails"))
def test_a_contradiction_is_the_error_of_the_page(block: Block, tmp_path: Path) -> None:
    *_, last = run(tmp_path, f"! ({block.code})").splitlines()
    assert last.endswith(block.prints)


def test_mpi_alone_as_a_transport_is_no_error_for_one_rank(tmp_path: Path) -> None:
    skip_without("mpi")
    assert "1 ranks have met" in run(tmp_path, "HVDLITE_TRANSPORT=mpi python train.py")


def test_every_block_of_commands_is_run_or_needs_a_cluster() -> None:
    """A block without a mark is one that only a real cluster can run."""
    for mark, code in re.findall(r"(<!-- .* -->\n)?```bash\n(.*?)```", PAGE.read_text(), re.DOTALL):
        assert mark or re.search(r"#SBATCH|bsub|kubectl", code), code
    assert len(blocks("run")) > 12
    assert [len(blocks(where)) for where in ("script", "fails")] == [2, 2]
