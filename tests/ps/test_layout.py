"""Layouts of a parameter server: published vectors, and laws over random tensors."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from hvdlite.ps.layouts import blocks as blocks_module
from hvdlite.ps.layouts.blocks import Block, TensorSpec, blocks_of
from hvdlite.ps.layouts.layout import Layout, Part, place, rebalance


def rows(layout: Layout) -> list[tuple[int, int, int, int]]:
    return [(part.key, part.start, part.stop, part.server) for part in layout.parts]


def test_tensors_are_cut_and_placed() -> None:
    layout = place([10, 7, 3], [4] * 3, 2, part_bytes=16)
    assert rows(layout) == [
        (0, 0, 4, 0), (0, 4, 7, 0), (0, 7, 10, 1), (1, 0, 4, 1), (1, 4, 7, 0), (2, 0, 3, 1),
    ]  # fmt: skip
    assert layout.loads() == [40, 40]


def test_ties_go_to_the_lowest_server() -> None:
    layout = place([8] * 4, [4] * 4, 3, part_bytes=1 << 40)
    assert [part.server for part in layout.parts] == [0, 1, 2, 0]
    assert layout.loads() == [64, 32, 32]


def resnet50() -> list[int]:
    """Return the sizes of its parameters, from the published architecture."""
    sizes = [64 * 3 * 7 * 7, 64, 64]
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for outputs, inputs, kernel in (
                (width, inside, 1), (width, width, 3), (4 * width, width, 1),
            ):  # fmt: skip
                sizes += [outputs * inputs * kernel * kernel, outputs, outputs]
            if block == 0:
                sizes += [4 * width * inside, 4 * width, 4 * width]
            inside = 4 * width
    return [*sizes, 1000 * 2048, 1000]


def test_blocks_are_of_one_kind_and_no_larger_than_they_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part that is larger has a block of its own."""
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 40)
    sizes = [
        (5, "float32", 0), (5, "float32", 0), (0, "float32", 0), (1, "float32", 0),
        (3, "float64", 0), (30, "float32", 0), (2, "float32", 1), (2, "float32", 0),
    ]  # fmt: skip
    specs = [
        TensorSpec(str(number), dtype, (size,), group)
        for number, (size, dtype, group) in enumerate(sizes)
    ]
    layout = place([spec.size for spec in specs], [spec.itemsize for spec in specs], 1, None)
    found = blocks_of(specs, 0, layout, 0)
    keys = [(block.group, block.dtype, [part.key for part in block.parts]) for block in found]
    assert keys == [
        (0, "float32", [0, 1, 2]), (0, "float32", [3]), (0, "float32", [5]), (0, "float32", [7]),
        (0, "float64", [4]), (1, "float32", [6]),
    ]  # fmt: skip


@pytest.mark.parametrize("num_servers", [2, 3, 4, 8])
@pytest.mark.parametrize("part_bytes", [4_096_000, None])
def test_resnet50_is_spread_evenly(num_servers: int, part_bytes: int | None) -> None:
    sizes = resnet50()
    assert (len(sizes), sum(sizes)) == (161, 25_557_032)
    layout = place(sizes, [4] * 161, num_servers, part_bytes)
    assert len(layout.parts) == (161 if part_bytes is None else 175)
    loads = layout.loads()
    assert max(loads) / (sum(loads) / num_servers) < 1.00015


@pytest.mark.parametrize("seed", range(20))
def test_every_element_has_one_server(seed: int) -> None:
    choose = random.Random(seed)
    sizes = [choose.choice([0, 1, 7, 1000, 12345]) for _ in range(choose.randrange(1, 30))]
    itemsizes = [choose.choice([2, 4, 8]) for _ in sizes]
    layout = place(sizes, itemsizes, choose.randrange(1, 6), choose.choice([64, 4096, None]))
    for _ in range(4):
        assert_covers(layout, sizes)
        more = [choose.randrange(500) for _ in range(3)]
        added = place(more, [4] * 3, layout.num_servers, 64, before=layout)
        assert set(layout.parts) <= set(added.parts)
        sizes += more
        layout = rebalance(added, choose.randrange(1, 7))
        assert_balanced(layout)


def assert_covers(layout: Layout, sizes: list[int]) -> None:
    seen = [np.zeros(size, int) for size in sizes]
    for part in layout.parts:
        seen[part.key][part.start : part.stop] += 1
        assert 0 <= part.server < layout.num_servers
    assert all((counts == 1).all() for counts in seen)
    assert {part.key for part in layout.parts} == {*range(len(sizes))}


def assert_balanced(layout: Layout) -> None:
    loads = layout.loads()
    fullest = loads.index(max(loads))
    # Moving any part of the fullest server would not bring the two nearer to each other.
    for part in layout.parts_of(fullest):
        assert not 0 < layout.bytes_of(part) < max(loads) - min(loads)


def owners(layout: Layout) -> np.ndarray:
    found = [np.full(size, -1) for size in [1000] * 40]
    for part in layout.parts:
        found[part.key][part.start : part.stop] = part.server
    return np.concatenate(found)


def test_a_new_server_gets_its_share_and_nothing_else_moves() -> None:
    old = place([1000] * 40, [4] * 40, 3, 4000)
    new = rebalance(old, 4)
    moved = owners(new)[owners(old) != owners(new)]
    assert moved.tolist() == [3] * 10_000
    assert max(new.loads()) - min(new.loads()) < 4000


def test_a_hundred_thousand_parts_are_placed_in_a_second() -> None:
    begin = time.process_time()
    layout = place([1000 + number % 7 for number in range(100_000)], [4] * 100_000, 16)
    assert len(layout.parts) == 100_000
    assert time.process_time() - begin < 5  # a second where nothing else runs


@pytest.mark.parametrize("elements", [1 << 29, (1 << 33) + 5])
def test_a_tensor_of_more_than_2_gib_is_cut_into_parts(elements: int) -> None:
    layout = place([elements], [4], 3)
    assert max(map(layout.bytes_of, layout.parts)) <= 4_096_000
    ends = [0, *(part.stop for part in layout.parts)]
    assert [part.start for part in layout.parts] == ends[:-1]
    assert ends[-1] == elements
    assert max(layout.loads()) - min(layout.loads()) <= 4_096_000


def test_only_a_block_of_one_small_part_is_copied_at_once() -> None:
    tensors = [np.arange(10, dtype="float32"), np.arange(8000, dtype="float32")]

    def copied(*parts: Part, dtype: str = "float32") -> bytes | None:
        return Block(dtype, 0, parts).small_copy(tensors, 5)

    assert copied(Part(5, 2, 7, 0)) == np.arange(2, 7, dtype="float32").tobytes()
    assert copied(Part(6, 0, 4096, 0)) == np.arange(4096, dtype="float32").tobytes()
    assert copied(Part(6, 0, 4097, 0)) is None
    assert copied(Part(5, 2, 7, 0), dtype="float64") is None
    assert copied(Part(5, 2, 7, 0), Part(6, 0, 4, 0)) is None
