"""The example of docs/data.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_example_trains_all_ranks_alike() -> None:
    found = re.search(r"<!-- example -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    code = compile(found[1].replace("hvd.init()\n", ""), str(PAGE), "exec")
    names_of: dict[int, Any] = {}

    def main(rank: int) -> list[torch.Tensor]:
        names: dict[str, Any] = names_of.setdefault(rank, {})
        exec(code, names)
        return [parameter.grad for parameter in names["model"].parameters()]

    first, second = run_ranks(2, main)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert names_of[1]["images"].shape == (2, 3, 64, 32)
