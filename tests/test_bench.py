"""``python -m hvdlite.bench``: what it prints, what it checks, and how it fails."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite import bench
from hvdlite.common.collectives.between_hosts.costs import ALLREDUCE, COSTS, cheapest
from hvdlite.common.collectives.between_hosts.model_file import load
from tests.ranks import run_ranks

SIZES = re.compile(r"^(\d+ (?:B|KiB|MiB)) ", re.MULTILINE)


def options(**given: Any) -> Namespace:
    return Namespace(**{"collective": "allreduce", "bytes": None, "calls": 1, **given})


@pytest.mark.parametrize("collective", bench.COLLECTIVES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_collective_is_checked_and_timed(
    collective: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = options(collective=collective, bytes=[12, 6144], calls=2)
    for command in (bench.latency, bench.bandwidth):
        run_ranks(ranks, lambda rank, command=command: command(plan))
        output = capsys.readouterr().out
        assert output.startswith(collective)
        divided = ranks == 2 and bench.COLLECTIVES[collective].divided
        assert SIZES.findall(output) == ["16 B" if divided else "12 B", "6 KiB"], output


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_tensor_goes_once_around_the_ring(
    ranks: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, float]] = []
    alltoall = hvd.alltoall

    def watched(array: Any, *args: Any, **kwargs: Any) -> Any:
        output, received = alltoall(array, *args, **kwargs)
        seen.append((hvd.rank(), float(output[0])))
        return output, received

    monkeypatch.setattr(hvd, "alltoall", watched)
    run_ranks(ranks, lambda rank: bench.ring(options(bytes=[4])))
    for rank in range(ranks):  # each element starts as the number of the rank that it comes from
        stops = [value for where, value in seen if where == rank]
        assert stops == [(rank - hop) % ranks for hop in range(1, ranks + 1)]
    assert re.search(rf"^4 B +{ranks} ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("collective", bench.COLLECTIVES)
@pytest.mark.parametrize("change", ["value", "shape"])
def test_a_wrong_result_on_one_rank_is_an_error_on_all(
    collective: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"allreduce": "allreduce_"}.get(collective, collective)
    right = getattr(hvd, name)

    def wrong(array: Any, *args: Any, **kwargs: Any) -> Any:
        result = right(array, *args, **kwargs)
        if hvd.rank() == 1:
            result = result[1:] if change == "shape" else result + (np.arange(len(result)) == 2)
        return result

    monkeypatch.setattr(hvd, name, wrong)
    said = {"value": r"has \S+ at index 2, and not ", "shape": r"has the shape \(\d+,\), and not "}

    def body(rank: int) -> None:
        with pytest.raises(bench.WrongResultError, match=rf"{collective} .*rank 1 {said[change]}"):
            bench.latency(options(collective=collective, bytes=[64]))

    run_ranks(2, body)


def test_ranks_tell_where_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(4, lambda rank: bench.helloworld(options()), hosts=[(0, 1), (2, 3)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["rank", str(rank)] for rank in range(4)]
    assert all(f" {rank % 2} of 2 " in line for rank, line in enumerate(lines[1:]))


@pytest.mark.parametrize("text", ["0", "-4", "1.5", "4k"])
def test_a_size_must_be_a_positive_number(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["latency", "--bytes", "4", text])
    said = capsys.readouterr().err
    assert f"{text!r}: must be a whole number" in said or f"unrecognized arguments: {text}" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_is_told_how_to_start_several(
    ranks: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("init", "shutdown"):
        monkeypatch.setattr(hvd, name, lambda: None)
    words = ["latency", "--bytes", "4", "--calls", "1"]
    codes = run_ranks(ranks, lambda rank: bench.main(words))
    said = capsys.readouterr()
    if ranks == 1:
        assert codes == [2] and said.out == ""
        start = "hvdlite-run -np 2 python -m hvdlite.bench latency --bytes 4 --calls 1"
        assert said.err == f"hvdlite.bench: 1 rank has no other to talk with; start 2: {start}\n"
    else:
        assert codes == [0, 0] and said.out.startswith("latency, 2 ranks\n")


def test_one_rank_says_where_it_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("init", "shutdown"):
        monkeypatch.setattr(hvd, name, lambda: None)
    assert run_ranks(1, lambda rank: bench.main(["helloworld"])) == [0]
    assert capsys.readouterr().out.startswith("helloworld, 1 rank\n")


@pytest.mark.thorough
def test_the_network_of_several_hosts_is_measured_compared_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.json"
    plan = options(bytes=[4096, 100_000], output=path)
    run_ranks(5, lambda rank: bench.model(plan), hosts=[(0, 1), (2, 3), (4,)])
    output = capsys.readouterr().out
    found = load(path)
    assert all(
        value > 0 for name, value in zip(found.names(), found.values, strict=True) if name != "call"
    )
    assert found.far_byte == found.byte  # Three hosts have none that is far.
    assert SIZES.findall(output) == ["4 KiB"] and re.search(r"^97.66 KiB ", output, re.MULTILINE)
    for name in COSTS[
        ALLREDUCE
    ]:  # The last column is the choice by the figures that were measured.
        assert re.search(rf"^3 hosts: .* {name} ", output, re.MULTILINE)
    (line,) = re.findall(r"^4 KiB .*$", output, re.MULTILINE)
    assert line.split()[-1] == cheapest(found, 3, 1, 4096)
    assert f"written to {path}" in output


def test_one_host_has_no_network_to_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.json"
    run_ranks(2, lambda rank: bench.model(options(output=path)))
    assert "there is no network to measure" in capsys.readouterr().out
    assert not path.exists()


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plan = options(bytes=[64], output=tmp_path / "file" / "model.json")

    def body(rank: int) -> None:
        if rank:
            bench.model(plan)
            return
        with pytest.raises(SystemExit, match=r"cannot write .*model.json: .*; --output names"):
            bench.model(plan)

    run_ranks(3, body, hosts=[(0,), (1,), (2,)])
