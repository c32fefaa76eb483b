"""The iteration trace without a framework: clocks, names, and files that fail."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import ConfigError
from hvdlite.common.iterations.marks import StepMarks
from hvdlite.common.iterations.rows import CsvFile, IterationRow, ParquetFile, read_rows
from hvdlite.common.iterations.trace import trace_iterations
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


def run_of(*names: str) -> SegmentRun:
    collective = names[-1].partition(".")[0].removeprefix("grouped_")
    return SegmentRun(names, collective, 4, 1.0, 2.0)


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("allreduce.conv.weight", True),
        ("grouped_allreduce.conv.weight_1of2", True),
        ("allgather.conv.weight.indices", True),
        ("allreduce.conv.weight.metric", False),
        ("allreduce.trainable_parameters.conv.weight", False),
        ("allreduce.conv", False),
        ("broadcast.conv.weight", False),
        ("allgather.conv.weight", False),
        ("allreduce.conv.weight.indices", False),
        ("allgather.conv.weight_1of2", False),
    ],
)
def test_gradients_are_known_by_their_names(name: str, taken: bool) -> None:
    names = ["conv.weight"]
    steps = StepMarks(lambda: names, lambda ended: True)
    assert steps.owns(run_of(name)) == taken
    assert steps.owns(run_of("allreduce.loss", name)) == taken
    assert not steps.owns(run_of("allreduce.new"))
    names.append("new")
    assert steps.owns(run_of("allreduce.new"))


def block(trace: Any, count: int = 1) -> None:
    for _ in range(count):
        with trace.iteration():
            hvd.allreduce(np.ones(3), name="gradient")


def test_times_are_on_the_clock_of_rank_0() -> None:
    def main(rank: int) -> list[IterationRow]:
        hvd.barrier()  # the engine has set its own
        engine = current().engine
        engine._control_plane.clock_offset.seconds = 1000.0 * rank  # as if on another host
        with trace_iterations() as trace:
            block(trace)
            return trace.gather()

    for here, there in run_ranks(2, main):
        assert (here.rank, there.rank) == (0, 1)
        assert 900 < there.segments[0].end - here.segments[0].end < 1100
        assert there.fp_start < there.segments[0].start < there.iteration_end


def test_a_disk_that_is_full_ends_the_file_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: CsvFile, rows: Any) -> None:
        raise OSError(28, "No space left on device", self.path)

    def main(rank: int) -> int:
        with trace_iterations(str(tmp_path / "t.csv")) as trace:
            block(trace)
            trace.rows()
            monkeypatch.setattr(CsvFile, "append", full)
            block(trace, 2)
            return len(trace.rows())

    with caplog.at_level(logging.WARNING, "hvdlite"):
        assert run_ranks(1, main) == [3]
    assert caplog.text.count("t.rank0.csv ends here: No space left on device") == 1
    assert len(read_rows(str(tmp_path / "t.rank0.csv"))) == 1


def test_a_file_that_cannot_be_completed_does_not_keep_a_rank_in_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")

    def full(self: ParquetFile) -> None:
        raise OSError(28, "No space left on device", self.path)

    monkeypatch.setattr(ParquetFile, "close", full)
    with caplog.at_level(logging.WARNING, "hvdlite"):
        run_ranks(1, lambda rank: block(trace_iterations(str(tmp_path / "t.parquet"))))
    assert "could not be completed" in caplog.text


def test_a_stop_in_the_middle_of_a_flush_ends_the_writer() -> None:
    """The writer clears its wake-up just after `stop` has set it."""

    def main(rank: int) -> None:
        trace = trace_iterations()
        clear = trace._wake.clear

        def stop_and_clear() -> None:
            trace._stopping.set()
            trace._wake.set()
            clear()

        trace._wake.clear = stop_and_clear  # type: ignore[method-assign]
        with trace.iteration():
            pass
        trace._writer.join(20)
        assert not trace._writer.is_alive()
        trace._stopping.clear()
        trace.stop()
        assert len(trace.rows()) == 1

    run_ranks(1, main)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_file_of_the_settings_that_cannot_be_written_is_an_error_at_init(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / "none" / f"t.{suffix}"
    wanted = rf"HVDLITE_TRACE_ITERATIONS: rank 0: .*t\.rank0\.{suffix} must be a file in a folder"
    with pytest.raises(ConfigError, match=wanted):
        run_ranks(1, lambda rank: None, config=Config(trace_iterations=str(path)))
    path.parent.mkdir()
    run_ranks(1, lambda rank: None, config=Config(trace_iterations=str(path)))
