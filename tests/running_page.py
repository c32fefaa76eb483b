"""The blocks of docs/running.md that can be run, and what they must print.

| before the block | the block | checked |
|---|---|---|
| ``<!-- run: 2 ranks -->`` | commands | two ranks of train.py have met, over TCP |
| ``<!-- run over MPI: 2 ranks -->`` | commands | the same, over MPI |
| ``<!-- run on nodea and nodeb: 2 ranks -->`` | commands, on each of these at once | the same |
| ``<!-- run in Slurm: 4 ranks -->`` | commands, on a login node | the same |
| ``<!-- script -->`` | script.py | what ``<!-- started by -->`` prints ``<!-- prints -->`` |
| ``<!-- fails -->`` | commands | their last line is that after ``<!-- prints -->`` |

Modules that a block needs follow the number of ranks: ``<!-- run: 2 ranks, torch -->``.
"""

from __future__ import annotations

import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "running.md"
BLOCK = re.compile(
    r"<!-- (?P<where>[a-zA-Z ]+)(: (?P<what>[^\n]*))? -->\n```\w*\n(?P<code>.*?)\n```\n"
    r"(?:\n<!-- started by -->\n```bash\n(?P<command>.*?)\n```\n)?"
    r"(?:\n<!-- prints -->\n```\n(?P<prints>.*?)\n```\n)?",
    re.DOTALL,
)
MET = re.compile(r"rank (\d+) of (\d+): (\d+) ranks? have met")
CONNECTED = re.compile(r"rank \d+ of \d+ runs on host .* over (\w+)")


@dataclass(frozen=True)
class Block:
    """A block of the page, and what stands in the mark before it."""

    where: str
    what: str
    code: str
    command: str  # That starts script.py.
    prints: tuple[str, ...]
    number: int

    @property
    def ranks(self) -> int:
        """The number of ranks that must meet."""
        return int(self.what.split()[0])

    @property
    def needs(self) -> list[str]:
        """The modules that must be installed."""
        return [word.strip() for word in self.what.split(",")[1:]]


def blocks(where: str) -> list[Block]:
    """Return the blocks whose mark begins with `where`."""
    found = enumerate(BLOCK.finditer(PAGE.read_text()))
    every = [
        Block(
            m["where"],
            m["what"] or "",
            m["code"],
            m["command"] or "",
            tuple((m["prints"] or "").splitlines()),
            number,
        )
        for number, m in found
    ]
    return [block for block in every if block.where.startswith(where)]


def prepare(folder: Path, seen_as: Path | None = None) -> dict[str, str]:
    """Write train.py and the programs of the page into `folder`; returns variables for a job.

    `seen_as` is the path of the folder where the job runs.
    """
    script = re.search(r"<!-- train.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert script is not None
    (folder / "train.py").write_text(script[1])
    programs = folder / "bin"
    programs.mkdir()
    modules = {
        "python": "",
        "hvdlite-run": "-m hvdlite.launcher",
        "torchrun": "-m torch.distributed.run",
        "accelerate": "-m accelerate.commands.accelerate_cli",
    }
    for name, words in modules.items():
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return {
        "PATH": ":".join(
            [f"{seen_as or folder}/bin", str(Path(sys.executable).parent), "/usr/bin", "/bin"]
        ),
        "HVDLITE_LOG_LEVEL": "debug",
        # What users of a machine with enough cores, who are not root, need not say.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "^ofi",  # As hvdlite-run sets it, which saves a second.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def check(block: Block, output: str) -> None:
    """Check that as many ranks have met as the page says, over the transport that it says."""
    met = sorted(tuple(map(int, found)) for found in MET.findall(output))
    assert met == [(rank, block.ranks, block.ranks) for rank in range(block.ranks)], output
    expected = {"MpiTransport" if block.where.endswith("over MPI") else "TcpTransport"}
    if block.ranks > 1:
        assert set(CONNECTED.findall(output)) == expected, output
