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
