"""Whoever waits hears of an end, whoever else does or does not take part."""

from __future__ import annotations

import pytest

from hvdlite.ps.messages import Message
from hvdlite.ps.shard import Shard


@pytest.mark.parametrize("word", ["push", "pull"])
def test_a_request_that_another_one_displaces_fails(word: str) -> None:
    """Two threads that use one table at the same time: none of them may wait for ever."""
    shard = Shard("t", 0, 3, {}, list, lambda _message: 1)
    ends: list[Message | Exception] = []
    others: list[Message | Exception] = []
    for done in (ends.append, others.append):
        if word == "push":
            shard.push({}, [], done)
        else:
            shard.pull(done)
    assert [str(error) for error in ends] == [
        f"worker 3 has begun another {word} of the table 't' before this one was answered: let one "
        "thread at a time use an optimizer"
    ]
    assert not others
