"""Workers that push and pull by names, without any optimizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.numpy import ps
from hvdlite.ps.tables.row_store import RowsSpec, first_rows


def main(_folder: Path) -> None:
    ps.init()
    rank = -1 if ps.role() == "server" else ps.rank()
    if rank == 1:  # finds what the other begins
        while True:
            try:
                assert ps.pull("begun").tolist() == [5, 6]
                break
            except HorovodInternalError as error:
                assert "no worker has begun 'begun'" in str(error)
    ps.start("begun", np.array([5, 6]))  # a server serves here, or above
    handles = [ps.push_async("counts", np.full((2, 3), 10.0**rank)) for _ in range(5)]
    others = ps.pull("counts")[1, 2] - 5 * 10.0**rank  # All of its own pushes are there.
    assert others / 10.0 ** (1 - rank) in range(6)
    assert all(ps.poll(handle) for handle in handles)
    assert [ps.synchronize(handle) for handle in handles] == [None] * 5
    ps.barrier()
    assert ps.pull("counts").tolist() == [[55] * 3] * 2
    with pytest.raises(ValueError, match="handle 3 was not created or has been cleared"):
        ps.synchronize(3)
    check_errors()
    sums()
    shares()
    rows()
    ps.barrier()
    ps.shutdown()


def check_errors() -> None:
    words = r"'counts' is float64 of shape \(2, 3\) on the servers, and float32 of shape \(3,\)"
    with pytest.raises(ValueError, match=words):
        ps.push("counts", np.zeros(3, np.float32))
    with pytest.raises(HorovodInternalError, match="no worker has begun rows 'nothing'"):
        ps.pull_rows("nothing", [1])
    with pytest.raises(ValueError, match="'counts' is no tensor of rows"):
        ps.pull_rows("counts", [1])
    with pytest.raises(ValueError, match="mode is 'later'"):
        ps.start("x", np.zeros(3), mode="later")
    with pytest.raises(ValueError, match="dtype str96 cannot be kept by a parameter server"):
        ps.start("x", np.array(["abc"]))
    with pytest.raises(TypeError, match="the name of a tensor is a text, not 3"):
        ps.push(3, np.zeros(3))
    with pytest.raises(ValueError, match=r"scale='1/W' divides .* 'x' .* it is int64: give floats"):
        ps.start("x", np.zeros(3, np.int64), scale="1/W")
    with pytest.raises(HorovodInternalError, match="no worker has begun 'x'"):
        ps.pull("x")
    begins_once()
    ps.barrier()
    if ps.rank() == 0:
        ps.start("mine", np.zeros(3))
    ps.barrier()
    if ps.rank() == 1:
        words = "workers disagree on the shape of 'raw.mine' .* worker 0 has .3.* worker 1 has .4"
        with pytest.raises(HorovodInternalError, match=words):
            ps.start("mine", np.zeros(4))


def begins_once() -> None:
    """A tensor keeps what it has begun with, and one of rows is none that is pushed as a whole."""
    ps.start("big", np.arange(3, dtype=">f4"))
    ps.start("big", np.zeros(3, np.float32))  # The same but for its values.
    ps.push("big", np.array([1, 1, 1], ">f4") * ps.rank())
    ps.barrier()
    assert ps.pull("big").tolist() == [1, 2, 3]
    for begin in (
        lambda: ps.start("big", np.zeros(3)),
        lambda: ps.start("big", np.zeros(4, np.float32)),
        lambda: ps.start("big", np.zeros(3, np.float32), mode="sync"),
        lambda: ps.start({"big": np.zeros(3, np.float32)}, op=ps.Average),
        lambda: ps.start_rows("big", 3, 1),
    ):
        with pytest.raises(ValueError, match=r"'big' has begun here as float32 of shape .3,"):
            begin()
    if ps.rank() == 0:
        ps.start_rows("few", 3, 2, initializer="zeros")
    ps.barrier()
    for call in (lambda: ps.pull("few"), lambda: ps.push("few", np.zeros((3, 2), np.float32))):
        with pytest.raises(ValueError, match="'few' is a tensor of rows: call push_rows and pull"):
            call()
    ps.push_rows("few", [1], np.ones((1, 2), np.float32))
    ps.barrier()
    ps.start_rows("few", 3, 2, initializer="zeros")
    assert ps.pull_rows("few", range(3)).tolist() == [[0, 0], [2, 2], [0, 0]]
    with pytest.raises(ValueError, match=r"'few' has begun here as .*seed=0.* again as .*seed=1"):
        ps.start_rows("few", 3, 2, initializer="zeros", seed=1)


def sums() -> None:
    """A sync tensor is what all workers push in a step, averaged."""
    ps.start("mean", np.ones(2), mode="sync", op=ps.Average)
    for step in range(3):
        ps.push_async("mean", np.full(2, float(ps.rank() + step)))
        assert ps.pull("mean").tolist() == [1 + sum(each + 0.5 for each in range(step + 1))] * 2


def shares() -> None:
    """Each push of an async tensor may count by the share of its worker."""
    ps.start("shared", np.ones(2), scale="1/W")
    ps.barrier()
    ps.push("shared", np.full(2, 6.0 + 4 * ps.rank()))
    ps.barrier()
    assert ps.pull("shared").tolist() == [1 + 6 / 2 + 10 / 2] * 2
    with pytest.raises(ValueError, match="scale='1/W' divides each push of modes async and ssp"):
        ps.start("no", np.ones(2), mode="sync", scale="1/W")


def rows() -> None:
    spec = RowsSpec(2**33, 2, seed=4)
    ps.start_rows("clicks", spec.count, 2, seed=4, mode="sync")
    ids = np.array([2**33 - 1, 6, 2**33 - 1])
    ps.push_rows("clicks", ids, np.ones((3, 2), np.float32))
    wanted = first_rows(spec, "raw.clicks", ids[:2]) + np.float32([[4], [2]])
    np.testing.assert_array_equal(ps.pull_rows("clicks", ids[:2]), wanted)
    with pytest.raises(ValueError, match="'clicks' is a tensor of rows"):
        ps.pull("clicks")
    with pytest.raises(ValueError, match="has no row 8589934592"):
        ps.pull_rows("clicks", [2**33])
