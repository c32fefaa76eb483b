"""Slices of batches of torch, samplers in its DataLoader, and the example of docs/data.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from hvdlite import data
from tests.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_parts_are_views() -> None:
    images = torch.arange(2 * 3 * 4 * 8.0).view(2, 3, 4, 8)

    def main(rank: int) -> None:
        part, _ = data.slice_batch((images, images[0]), ((1, 1, 1, 4), (1, 1, 1)))
        assert torch.equal(part, images[..., 2 * rank : 2 * rank + 2])
        assert part.data_ptr() == images.data_ptr() + 2 * rank * images.element_size()
        part = data.slice_batch(images, patches=(2, 2))
        assert torch.equal(part, images.chunk(2, 2)[rank // 2].chunk(2, 3)[rank % 2])
        assert part.untyped_storage().data_ptr() == images.untyped_storage().data_ptr()

    run_ranks(4, main)


def test_a_loader_whose_batches_are_cut() -> None:
    dataset = TensorDataset(torch.arange(8 * 6.0).view(8, 6), torch.arange(8))

    def main(rank: int) -> list[list[torch.Tensor]]:
        strategy = ((1, 2), (1,))
        sampler = data.sampler_for(strategy, dataset)
        loader = data.Sliced(DataLoader(dataset, batch_size=4, sampler=sampler), strategy)
        assert len(loader) == 2
        return list(loader)

    left, right = run_ranks(2, main)
    for (first, labels), (second, same) in zip(left, right, strict=True):
        assert torch.equal(labels, same)
        assert torch.equal(torch.cat([first, second], 1), dataset.tensors[0][labels])


def test_the_example_of_the_page_trains_all_ranks_alike() -> None:
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
