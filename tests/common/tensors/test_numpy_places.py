"""Where the memory of numpy arrays begins, which compiled code reads and writes."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

from hvdlite.common.tensors.numpy_adapter import NumpyAdapter


@pytest.mark.parametrize("dtype", ["float32", "float16", "bool", "complex128", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0)])
def test_the_place_of_an_array_is_that_of_its_first_element(
    dtype: object, shape: tuple[int, ...]
) -> None:
    adapter, array = NumpyAdapter(), np.zeros((3, *shape), dtype)[1]  # In the middle of its memory.
    if not shape:
        array = np.zeros((), dtype)
    place = adapter.place(array, adapter.spec(array))
    assert place is not None
    assert place[0] == array.ctypes.data and place[1] is array


def test_an_array_whose_place_is_known_can_be_resized_and_freed() -> None:
    adapter, array = NumpyAdapter(), np.zeros(5)
    before = sys.getrefcount(array)
    place = adapter.place(array, adapter.spec(array))
    del place
    assert sys.getrefcount(array) == before
    array.resize(10_000)
    place = adapter.place(array, adapter.spec(array))
    assert place is not None and place[0] == array.ctypes.data


def test_a_matrix_in_place_is_flat_like_any_array() -> None:
    matrix = np.array([[1.0, 2.0], [3.0, 4.0]]).view(np.matrix)
    memory = NumpyAdapter().output(matrix)
    assert memory.array.shape == (4,)
    memory.array[:] = 7
    assert matrix.tolist() == [[7, 7], [7, 7]]


@pytest.mark.parametrize("dtype", [None, "int8", "uint8", "int16", "int32", "int64", "uint64"])
def test_received_splits_have_room_for_every_count(dtype: str | None) -> None:
    """They have the dtype of the splits that were given, wherever they fit."""
    like = [1] if dtype is None else np.zeros(1, dtype)
    for splits in ([0, 3], [300, 2], [70_000, 1], [1 << 40, 0]):
        made = NumpyAdapter().make_splits(splits, like)
        assert made.tolist() == splits
        fits = max(splits) <= np.iinfo(dtype or "int32").max
        assert made.dtype == ((dtype or "int32") if fits else np.int64)
