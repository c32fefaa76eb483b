"""What bad input gets: the exception type, and a text that says what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from tests.ranks import run_ranks

Call = Callable[[], Any]


def on_ranks(check: Callable[[int], None], size: int = 2) -> None:
    """Run a check that must leave the job in order."""

    def main(rank: int) -> None:
        check(rank)
        assert hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum).item() == size

    run_ranks(size, main)


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give them up
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


QUANTIZED = quantized()
SPARSE = torch.eye(2).to_sparse()
AT_THE_CALL: dict[str, tuple[Call, str]] = {
    "quantized": (lambda: hvd.allreduce(QUANTIZED), "Tensor type torch.qint8 is not supported"),
    "float8": (
        lambda: hvd.broadcast(torch.ones(2).to(torch.float8_e4m3fn), 0), "is not supported",
    ),
    "sparse": (lambda: hvd.allreduce(SPARSE), "sparse_allreduce_async"),
    "dense": (lambda: hvd.sparse_allreduce_async(torch.ones(2), "x", hvd.Sum), "sparse COO"),
    "sparse max": (lambda: hvd.sparse_allreduce_async(SPARSE, "x", hvd.Max), "Sum or Average"),
    "a list": (lambda: hvd.allreduce([1.0]), "a torch.Tensor is needed, not list"),  # type: ignore
    "meta": (lambda: hvd.allreduce(torch.ones(2, device="meta")), "'meta' cannot be communicated"),
    "complex max": (lambda: hvd.allreduce(torch.ones(2) * 1j, op=hvd.Max), "no order"),
    "bool average": (lambda: hvd.allreduce(torch.tensor([True])), "Average of bool"),
    "int adasum": (lambda: hvd.allreduce(torch.tensor([1]), op=hvd.Adasum), "floating-point"),
    "op and average": (
        lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "op parameter supersedes",
    ),
    "op": (lambda: hvd.allreduce(torch.ones(1), op=77), "op=77"),
    "root": (lambda: hvd.broadcast(torch.ones(1), 2), "invalid root rank 2"),
    "splits 2-D": (
        lambda: hvd.alltoall(torch.ones(2), torch.ones(1, 2).int()), "1-dimensional",
    ),
    "splits int64": (lambda: hvd.alltoall(torch.ones(2), torch.tensor([1, 1])), "must be int32"),
    "splits float": (lambda: hvd.alltoall(torch.ones(2), [0.5, 1.5]), "integers"),
    "splits sum": (lambda: hvd.alltoall(torch.ones(2), [1, 2]), "beyond 2 rows"),
    "splits count": (lambda: hvd.alltoall(torch.ones(3), [1, 1, 1]), "3 splits for 2 ranks"),
    "splits missing": (lambda: hvd.alltoall(torch.ones(3)), "divisible"),
    "scatter scalar": (lambda: hvd.reducescatter(torch.tensor(1.0)), "does not support scalar"),
    "unknown set": (
        lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0])), "does not exist",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_THE_CALL)
def test_value_error_at_the_call(name: str) -> None:
    call, text = AT_THE_CALL[name]

    def check(rank: int) -> None:
        with pytest.raises(ValueError, match=text):
            call()

    on_ranks(check)


def test_a_set_that_this_rank_is_not_a_member_of() -> None:
    def check(rank: int) -> None:
        alone = hvd.add_process_set([0])
        if rank == 1:
            with pytest.raises(ValueError, match="Rank 1 is not a member"):
                hvd.allreduce(torch.ones(1), process_set=alone)

    on_ranks(check)


def test_a_name_that_is_pending() -> None:
    def check(rank: int) -> None:
        if rank == 0:
            handle = hvd.allreduce_async(torch.ones(1), name="twice")
            with pytest.raises(ValueError, match="same name as another tensor"):
                hvd.allreduce_async(torch.ones(1), name="twice")
            hvd.allreduce(torch.ones(1), name="go")
        else:
            hvd.allreduce(torch.ones(1), name="go")
            handle = hvd.allreduce_async(torch.ones(1), name="twice")
        hvd.synchronize(handle)

    on_ranks(check)


NO_ROWS = "without dimensions has no rows"
MISMATCHES: dict[str, tuple[Callable[[int], Any], str]] = {
    "dtype": (
        lambda r: hvd.allreduce(torch.ones(2, dtype=[torch.float32, torch.int32][r]), name="x"),
        "data type: rank 0 has float32, rank 1 has int32",
    ),
    "shape": (
        lambda r: hvd.allreduce(torch.ones(2 + r), name="x"), r"has \(2,\), rank 1 has \(3,\)",
    ),
    "rank": (lambda r: hvd.broadcast(torch.ones([1] * (r + 1)), 0, name="x"), "shape"),
    "op": (
        lambda r: hvd.allreduce(torch.ones(2), name="x", op=[hvd.Sum, hvd.Max][r]),
        "rank 0 has Sum, rank 1 has Max",
    ),
    "scale": (
        lambda r: hvd.allreduce(torch.ones(2), name="x", prescale_factor=1.0 + r), "prescale",
    ),
    "root": (lambda r: hvd.broadcast(torch.ones(2), r, name="x"), "root rank"),
    "rows": (lambda r: hvd.allgather(torch.ones(1, 2 + r), name="x"), "after the first dimension"),
    "gather scalar": (lambda r: hvd.allgather(torch.tensor(1.0), name="x"), NO_ROWS),
    "alltoall scalar": (lambda r: hvd.alltoall(torch.tensor(1.0), name="x"), NO_ROWS),
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCHES)
def test_what_ranks_disagree_on_fails_on_every_rank(name: str) -> None:
    call, text = MISMATCHES[name]

    def check(rank: int) -> None:
        with pytest.raises(hvd.HorovodInternalError, match=text):
            call(rank)

    on_ranks(check)


def test_before_init() -> None:
    with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
        hvd.allreduce(torch.ones(1))
    with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
        hvd.size()
    parameter = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))


def test_an_adasum_of_parts_is_an_error_of_every_kind() -> None:
    def check(rank: int) -> None:
        for kind in (ValueError, RuntimeError):
            with pytest.raises(kind, match="reducescatter has no Adasum"):
                hvd.reducescatter(torch.ones(2), op=hvd.Adasum)

    on_ranks(check)


def test_average_is_deprecated() -> None:
    def check(rank: int) -> None:
        with pytest.warns(DeprecationWarning, match="use op="):
            assert hvd.allreduce(torch.ones(1), average=False).item() == 1.0

    on_ranks(check, size=1)  # threads share the list of warnings


def test_a_target_whose_elements_share_memory_is_refused_at_the_call() -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"share memory .* cannot be written in place"):
            hvd.allreduce_(torch.zeros(1).expand(3), name="t")
        assert hvd.allreduce(torch.ones(1).expand(3), name="t", op=hvd.Sum).tolist() == [2.0] * 3

    run_ranks(2, main)
