"""Warnings of hvdlite show the line of the user who can do something about it."""

from __future__ import annotations

import pytest

from hvdlite.common.api.options import resolve_op
from hvdlite.common.gradients.buckets import resolve_groups


@pytest.mark.parametrize(
    "call", [lambda: resolve_op(True, None), lambda: resolve_groups(2, None)], ids=["op", "groups"]
)
def test_a_warning_points_here(call: object) -> None:
    assert callable(call)
    with pytest.warns(DeprecationWarning) as caught:
        call()
    assert [warning.filename for warning in caught] == [__file__]
