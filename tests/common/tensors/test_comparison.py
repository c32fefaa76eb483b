"""The comparison of tensors over ranks: digests, and the words of the error."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from hvdlite.common.api.objects import GatherByRank
from hvdlite.common.tensors.comparison import (
    BLOCK_BYTES,
    Compared,
    compare,
    factors,
    of_array,
    sums_of,
)
from hvdlite.common.tensors.numpy_adapter import Array
from tests.ranks import run_ranks


@pytest.mark.parametrize("size", [0, 1, 7, 8, 8191, 8192, 8193, 3 * 8192 + 5])
def test_sums_are_those_of_whole_numbers(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    expected = []
    for start in range(0, size, BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES].tobytes().ljust(BLOCK_BYTES, b"\0")
        words = [int.from_bytes(block[at : at + 8], "little") for at in range(0, BLOCK_BYTES, 8)]
        words = [word ^ (word >> 32) for word in words]
        total = sum(word * int(factor) for word, factor in zip(words, factors(), strict=True))
        expected.append(total % 2**64)
    assert [int(each) for each in sums_of(data)] == expected


def test_every_bit_and_every_place_counts() -> None:
    base = np.random.default_rng(1).integers(0, 256, 20_000, dtype=np.uint8)
    digests = {of_array("x", base).facts().digest}
    for at in range(0, base.size, 999):
        for bit in range(8):
            changed = base.copy()
            changed[at] ^= 1 << bit
            digests.add(of_array("x", changed).facts().digest)
    flipped = base.copy()
    flipped[[7, 15]] ^= 0x80
    digests.add(of_array("x", flipped).facts().digest)
    swapped = base.copy()
    swapped[:8], swapped[8:16] = base[8:16], base[:8]
    digests.add(of_array("x", swapped).facts().digest)
    assert len(digests) == 1 + 8 * len(range(0, base.size, 999)) + 2


def on_ranks(size: int, arrays: Sequence[Sequence[tuple[str, Array]]]) -> list[str]:
    """What each rank is told of the arrays of all of them; empty where they are equal."""

    def main(rank: int) -> str:
        tensors: list[Compared] = [of_array(name, array) for name, array in arrays[rank]]
        try:
            compare(tensors, "weights differ", "Broadcast them", GatherByRank("test"))
        except RuntimeError as error:
            return str(error)
        return ""

    texts = run_ranks(size, main)
    assert len(set(texts)) == 1, texts
    return texts


def test_the_first_element_of_one_rank_is_named() -> None:
    """A change of one unit in the last place, behind the first block, in the second tensor."""
    weight = np.random.default_rng(2).normal(size=(100, 50)).astype(np.float32)
    changed = weight.copy()
    changed[93, 17] = np.nextafter(changed[93, 17], np.float32(9))
    changed[94, 1] += 1
    same = ("bias", np.zeros(3))
    ranks = [[same, ("weight", changed if rank == 2 else weight)] for rank in range(4)]
    text = on_ranks(4, ranks)[0]
    assert text.startswith(
        "weights differ: rank 2 differs from ranks 0, 1 and 3 in 1 of 2 tensors, first in 'weight':"
        f" element [93, 17] is {weight[93, 17]!s} on rank 0 and {changed[93, 17]!s} on rank 2 "
        "(ranks 0, 1 and 3: float32 of shape (100, 50), digest "
    )
    assert text.endswith(". Broadcast them")


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (np.float32(1), np.float32(2), "'x': it is 1.0 on rank 0 and 2.0 on rank 1 ("),
        (
            np.zeros(2),
            -np.zeros(2),
            "element [0] is 0.0 on rank 0 and -0.0 on rank 1 (",
        ),
        (np.zeros(3, bool), np.array([0, 0, 1], bool), "element [2] is False on rank 0 and True"),
        (np.zeros(2, np.float32), np.zeros(2), "'x' (rank 0: float32 of shape (2,), digest"),
        (np.zeros(2), np.zeros((2, 1)), "rank 1: float64 of shape (2, 1), digest"),
        (
            np.array([1], ml_dtypes.bfloat16),
            np.array([1.5], ml_dtypes.bfloat16),
            "element [0] is 1 on rank 0 and 1.5 on rank 1",
        ),
    ],
)
def test_values_of_two_ranks(one: Array, other: Array, words: str) -> None:
    text = on_ranks(2, [[("x", np.asarray(one))], [("x", np.asarray(other))]])[0]
    assert "ranks 0 and 1 differ, without a majority that agrees, in 1 of 1" in text
    assert words in text


def test_equal_bits_of_nan_are_equal_and_others_are_not() -> None:
    nan = np.array([np.nan, 1.0])
    assert on_ranks(2, [[("x", nan)], [("x", nan.copy())]]) == ["", ""]
    other = nan.view(np.uint64) + np.array([1, 0], np.uint64)
    text = on_ranks(2, [[("x", nan)], [("x", other.view(np.float64))]])[0]
    assert "element [0] is nan (0x7ff8000000000000) on rank 0 and nan (0x7ff8000000000001)" in text


def test_what_changes_while_it_is_compared_is_said() -> None:
    def main(rank: int) -> None:
        array = np.full(4, rank)
        tensor = of_array("x", array)

        class Gather(GatherByRank):
            def are_equal(self, name: str, body: bytes) -> bool:
                array[:] = 7
                return super().are_equal(name, body)

        with pytest.raises(RuntimeError, match="differ: another thread changed them meanwhile"):
            compare([tensor], "weights differ", "", Gather("test"))

    run_ranks(2, main)


def test_a_tensor_that_one_rank_lacks_and_other_orders() -> None:
    here, there = ("a", np.zeros(2)), ("b", np.ones(2))
    assert on_ranks(2, [[here, there], [there, here]]) == ["", ""]
    text = on_ranks(3, [[here, there], [here], [here, there]])[0]
    assert "rank 1 differs from ranks 0 and 2 in 1 of 2 tensors, first in 'b' (ranks 0 a" in text
    assert "rank 1: none)" in text
