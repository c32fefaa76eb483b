"""Calls that come again under a name, which are prepared once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite.numpy as hvd_numpy
import hvdlite.torch as hvd
from hvdlite.common.api.starting_forms import RepeatedCall
from hvdlite.common.api.tensor_entries import PlacedEntry
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.requests.handles import Handle
from hvdlite.common.runtime.current import current
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


def test_calls_that_come_again_make_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[type] = []

    def counting(kind: type) -> None:
        init: Any = kind.__init__

        def counted(self: Any, *args: Any) -> None:
            made.append(type(self))
            init(self, *args)

        monkeypatch.setattr(kind, "__init__", counted)

    def main(rank: int) -> None:
        tensors = [torch.zeros(3), torch.zeros(2, 2)]
        for step in range(4):
            if step == 2:
                hvd.barrier()
                made.clear()
                meeting.wait()
            for index, tensor in enumerate(tensors):
                tensor.fill_(step + index + rank)
            handles = [
                hvd.allreduce_async_(tensor, name=f"t{index}", op=hvd.Sum)
                for index, tensor in enumerate(tensors)
            ]
            for index, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
                assert hvd.synchronize(handle) is tensor
                assert tensor.eq(2 * (step + index) + 1).all()
        meeting.wait()
        assert made == []

    meeting = threading.Barrier(2, timeout=30)
    for kind in (PlacedEntry, Handle, RepeatedCall):
        counting(kind)
    run_ranks(2, main)


def test_calls_are_kept_no_longer_than_what_was_prepared_for_them() -> None:
    """Names that never come again make no list that grows."""

    def main(rank: int) -> None:
        runtime, tensor = current(), torch.ones(1)
        for name in "ab":
            hvd.allreduce_(tensor, name=name, op=hvd.Sum)
            handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
            if name == "b":
                runtime.forget_calls()
            hvd.synchronize(handle)
            assert set(runtime.repeated) == ({"allreduce.a"} if name == "a" else set())

    run_ranks(1, main)


def test_a_call_that_comes_again_after_an_error_and_with_other_tensors() -> None:
    def main(rank: int) -> None:
        def reduced(tensor: Any, module: Any = hvd, **options: Any) -> Any:
            return module.synchronize(module.allreduce_async_(tensor, name="t", **options))

        for _ in range(3):
            assert reduced(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
        with pytest.raises(HorovodInternalError, match=r"\(3,\).*\(4,\)"):
            reduced(torch.ones(3 + rank), op=hvd.Sum)
        for _ in range(2):
            assert reduced(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
            assert reduced(torch.ones(3), op=hvd.Average).tolist() == [1, 1, 1]
            assert reduced(torch.ones(3, dtype=torch.int32), op=hvd.Sum).tolist() == [2, 2, 2]
            assert reduced(torch.ones(2, 3).t(), op=hvd.Sum).shape == (3, 2)
            array = np.ones(3, np.float32)
            assert reduced(array, hvd_numpy, op=hvd.Sum) is array and array.tolist() == [2, 2, 2]

    run_ranks(2, main)
