"""Tracebacks end with the user's call where hvdlite raises, and are whole where it is wrong."""

from __future__ import annotations

import contextlib
import json
import linecache
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.api.options import resolve_op
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.report_failure import leave_out_own_frames
from hvdlite.common.base.user_frames import (
    OWN_FOLDER,
    is_of_user,
    stack_of_user,
    without_own_frames,
)
from hvdlite.common.gradients.buckets import resolve_groups
from hvdlite.common.runtime.current import this_process
from tests.ranks import run_ranks

HERE = str(Path(__file__))


def caught(call: Callable[[], Any]) -> Exception:
    """Return what `call` raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")


def files(error: BaseException) -> list[str]:
    """Return the files of an error's traceback, the last call last."""
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_a_mismatch_is_shown_at_the_call() -> None:
    def main(rank: int) -> tuple[Exception, list[str]]:
        error = caught(lambda: hvd.allreduce(np.ones(3 + rank), name="x"))
        whole = files(error)
        leave_out_own_frames(error)
        return error, whole

    for error, whole in run_ranks(2, main):
        assert isinstance(error, HorovodInternalError) and "ranks disagree on shape" in str(error)
        assert len(whole) > 5 and "hvdlite" in whole[-1]
        assert files(error) == [HERE, HERE]  # `caught`, and the call in the lambda.


def test_a_refused_call_is_shown_at_the_call() -> None:
    error = caught(lambda: hvd.allreduce(np.ones(3)))  # Before init().
    assert files(error)[-1] != HERE
    leave_out_own_frames(error)
    assert files(error) == [HERE, HERE]


def test_a_mistake_in_hvdlite_is_shown_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_process, "runtime", object())  # It has no attribute that counts.
    error = caught(lambda: hvd.allreduce(np.ones(3)))
    assert isinstance(error, AttributeError)
    whole = files(error)
    leave_out_own_frames(error)
    assert files(error) == whole and "hvdlite" in whole[-1]


def test_errors_of_the_script_stay_as_they_are() -> None:
    error = caught(lambda: np.ones(3).reshape(5))
    assert without_own_frames(error.__traceback__) is error.__traceback__
    assert without_own_frames(None) is None


OWN_CODE = """
import contextlib

class Quiet(contextlib.ContextDecorator):
    def __enter__(self):
        pass
    def __exit__(self, *error):
        pass

@Quiet()
def begin():
    raise ValueError("no data")

def call():
    begin()
"""


def test_a_context_manager_between_two_frames_is_not_the_script_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = f"{OWN_FOLDER}/with_contexts.py"
    entry = (len(OWN_CODE), None, OWN_CODE.splitlines(keepends=True), file)
    monkeypatch.setitem(linecache.cache, file, entry)
    names: dict[str, Any] = {}
    exec(compile(OWN_CODE, file, "exec"), names)
    error = caught(names["call"])
    assert [Path(file).name for file in files(error)[1:]] == [
        "with_contexts.py", "contextlib.py", "with_contexts.py"
    ]  # fmt: skip
    leave_out_own_frames(error)
    assert files(error) == [HERE]


WAITING_CODE = """
import sys
from contextlib import nullcontext
from hvdlite.common.base.user_frames import stack_of_user

def allreduce():
    return wait()

def wait():
    with nullcontext():
        return stack_of_user(sys._getframe())
"""


def test_the_stack_of_a_thread_that_waits_ends_with_its_call() -> None:
    names: dict[str, Any] = {}
    exec(compile(WAITING_CODE, f"{OWN_FOLDER}/waiting.py", "exec"), names)

    def train() -> str:
        return str(names["allreduce"]())

    waits, works = train(), stack_of_user(sys._getframe())
    assert waits.endswith('return str(names["allreduce"]())\n') and "waiting.py" not in waits
    assert works.endswith("stack_of_user(sys._getframe())\n")


@pytest.mark.parametrize(
    ("filename", "users"),
    [
        ("train.py", True),
        ("/home/ann/json/train.py", True),
        ("<stdin>", True),
        (json.__file__, False),
        (contextlib.__file__, False),
        (np.__file__, False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", False),
        ("<frozen runpy>", False),
        (hvd.__file__, False),
    ],
)
def test_which_files_are_the_users(filename: str, users: bool) -> None:
    assert is_of_user(filename) == users


def test_the_causes_of_an_error_are_shortened_too() -> None:
    def convert() -> None:
        try:
            hvd.allreduce(np.ones(3))
        except HorovodInternalError as error:
            raise RuntimeError("no training") from error

    error = caught(convert)
    leave_out_own_frames(error)
    assert error.__cause__ is not None and files(error.__cause__) == [HERE]


def test_debugging_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_LOG_LEVEL", "debug")
    error = caught(lambda: hvd.allreduce(np.ones(3)))
    whole = files(error)
    leave_out_own_frames(error)
    assert files(error) == whole and len(whole) > 2


def test_a_debugger_still_finds_all_frames() -> None:
    error = caught(lambda: hvd.allreduce(np.ones(3)))
    last = error.__traceback__  # As `sys.last_traceback` has it.
    whole = traceback.extract_tb(last)
    leave_out_own_frames(error)
    assert traceback.extract_tb(last) == whole
    assert sys.exc_info() == (None, None, None)


@pytest.mark.parametrize(
    "call", [lambda: resolve_op(True, None), lambda: resolve_groups(2, None)], ids=["op", "groups"]
)
def test_a_warning_points_here(call: object) -> None:
    assert callable(call)
    with pytest.warns(DeprecationWarning) as caught:
        call()
    assert [warning.filename for warning in caught] == [__file__]
