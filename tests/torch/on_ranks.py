"""Tests that are what each rank does: no more than a number of ranks is around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from typing import Any

from tests.ranks import run_ranks


def on_ranks(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let so many ranks run a test, whose first argument is the rank; the others are pytest's."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**given: Any) -> None:
            run_ranks(size, lambda rank: test(rank, **given))

        _, *others = signature(test).parameters.values()
        run.__signature__ = Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate
