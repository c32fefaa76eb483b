"""`--autotune`: what is found on a machine that is simulated, and how all ranks switch."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.between_hosts.costs import PIECE_BYTES
from hvdlite.common.decisions.autotuner import Autotuner, Sample
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.engine import executor as execution
from hvdlite.common.engine.autotuning import AutotuneLog
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.requests.messages import Eviction, Report, Request, Response, Retune, Segment
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from hvdlite.common.settings.setting import MIB
from tests.ranks import run_ranks

ONE_HOST = Topology.single_host(4)
TWO_HOSTS = Topology(((0, 1), (2, 3)))
ONE_RANK_A_HOST = Topology(((0,), (1,)))
STEP_BYTES = 10_000_000
Speed = Callable[[Retune], float]  # seconds of a step


def run(
    tuner: Autotuner, seconds: Speed, noise: float = 0.0, seed: int = 1, most_steps: int = 10_000
) -> tuple[Retune, list[Sample], int]:
    """Train until the tuner has finished: what it keeps, its log, and the steps that took."""
    random = Random(seed)
    now = 100.0
    values = Retune(128 * MIB, 1.0, 1024, "auto", PIECE_BYTES)
    samples: list[Sample] = []
    for step in range(most_steps):
        if tuner.finished:
            return values, samples, step
        now += seconds(values) * max(random.gauss(1, noise), 0.1)
        for name in ("a", "b"):
            retune = tuner.observe((name,), STEP_BYTES // 2, now)
            samples += tuner.pop_samples()
            if retune is not None:
                values = retune
                tuner.settings_applied()
    raise AssertionError("it never ends")


def bowl(megabytes: float, cycle_ms: float, slope: float = 0.0) -> Speed:
    """The best is there; it gets worse by the logarithm of the distance.

    A `slope` makes it a valley aslant, in which both settings have to change together.
    """

    def seconds(values: Retune) -> float:
        size = math.log2(values.fusion_threshold_bytes / MIB / megabytes) / 8
        cycle = (math.log1p(values.cycle_time_ms) - math.log1p(cycle_ms)) / 8**0.5
        return 0.01 * (1 + size**2 + cycle**2 + 2 * slope * size * cycle)

    return seconds


# -- what is found


@pytest.mark.parametrize("slope", [-0.9, 0, 0.9])
@pytest.mark.parametrize(("megabytes", "cycle_ms"), [(8, 5), (64, 0), (1, 50), (128, 1)])
def test_it_finds_what_is_nearly_the_best(megabytes: float, cycle_ms: float, slope: float) -> None:
    seconds = bowl(megabytes, cycle_ms, slope)
    kept, _, _ = run(Autotuner(Config(), ONE_HOST), seconds)
    assert seconds(kept) <= 1.03 * 0.01


@pytest.mark.parametrize("seed", range(10))
def test_it_never_keeps_what_is_clearly_worse_than_the_defaults(seed: int) -> None:
    seconds = bowl(128, 1)  # the defaults are the best, and samples are noisy
    kept, _, _ = run(Autotuner(Config(), TWO_HOSTS), seconds, noise=0.1, seed=seed)
    assert seconds(kept) <= 1.05 * 0.01


def test_what_was_only_lucky_is_not_kept() -> None:
    steps: dict[Retune, int] = {}
    defaults = Retune(128 * MIB, 1.0, 1024, "auto", PIECE_BYTES)

    def seconds(values: Retune) -> float:
        steps[values] = steps.get(values, 0) + 1
        lucky = values != defaults and steps[values] <= 60  # a sample has 50 steps
        return 0.005 if lucky else 0.01 if values == defaults else 0.02

    assert run(Autotuner(Config(), TWO_HOSTS), seconds)[0] == defaults


def test_where_nothing_makes_a_difference_the_defaults_stay() -> None:
    kept, samples, _ = run(Autotuner(Config(), TWO_HOSTS), lambda values: 0.01)
    assert kept == samples[0].values == Retune(128 * MIB, 1.0, 1024, "auto", PIECE_BYTES)


@pytest.mark.parametrize(
    ("change", "topology"),
    [
        ({"allreduce": "ring"}, TWO_HOSTS),
        ({"piece_bytes": 4 * PIECE_BYTES}, TWO_HOSTS),
        ({"piece_bytes": PIECE_BYTES // 4}, ONE_RANK_A_HOST),
        ({"cache_capacity": 0}, ONE_HOST),
    ],
)
def test_what_is_tuned_one_by_one(change: dict[str, Any], topology: Topology) -> None:
    def seconds(values: Retune) -> float:
        return 0.01 if values == values._replace(**change) else 0.02

    kept, _, _ = run(Autotuner(Config(), topology), seconds)
    assert kept == kept._replace(**change)


def test_the_defaults_are_the_first_sample_and_measured_against_the_best_at_the_end() -> None:
    _, samples, _ = run(Autotuner(Config(), ONE_HOST), bowl(8, 5))
    defaults = samples[0].values
    *_, before_last, last = samples
    assert defaults == Retune(128 * MIB, 1.0, 1024, "auto", PIECE_BYTES)
    assert [sample.values for sample in samples[-7:-1]] == [last.values, defaults] * 3
    assert before_last.score < last.score


def test_the_flags_say_how_long_it_takes() -> None:
    config = Config(autotune_warmup_samples=2, autotune_max_samples=7, autotune_steps_per_sample=4)
    _, samples, steps = run(Autotuner(config, ONE_HOST), bowl(8, 5))
    joint, cache, duel, best = 7, 1, 6, 1
    assert len(samples) == joint + cache + duel + best
    samples = 2 + joint + cache + duel
    assert samples * 5 * 4 <= steps <= samples * (5 * 4 + 1)


def test_a_score_is_bytes_in_a_microsecond() -> None:
    _, samples, _ = run(Autotuner(Config(), ONE_HOST), lambda values: 0.01)
    for sample in samples:
        assert sample.score == pytest.approx(STEP_BYTES / 1e4)


def test_what_the_user_has_set_is_not_tuned() -> None:
    environ = {
        "HOROVOD_FUSION_THRESHOLD": str(3 * MIB),
        "HVDLITE_ALLREDUCE": "hierarchical",
        "HOROVOD_CACHE_CAPACITY": "7",
    }
    _, samples, _ = run(Autotuner(Config.from_environ(environ), TWO_HOSTS), bowl(8, 5))
    tried = [sample.values for sample in samples]
    assert {each.fusion_threshold_bytes for each in tried} == {3 * MIB}
    assert {each.allreduce for each in tried} == {""}
    assert {each.cache_capacity for each in tried} == {7}
    assert len({each.cycle_time_ms for each in tried}) > 3


def test_tensors_without_a_name_do_not_make_a_step() -> None:
    tuner = Autotuner(Config(), ONE_HOST)
    for number in range(1000):
        assert tuner.observe((f"noname.{number}",), 100, float(number)) is None
    assert tuner.pop_samples() == []


# -- the log


def test_the_log_has_horovods_columns_and_ends_with_the_best(tmp_path: Path) -> None:
    log = AutotuneLog(str(tmp_path / "log.csv"))
    kept, samples, _ = run(Autotuner(Config(), TWO_HOSTS), bowl(8, 5))
    for sample in samples:
        log.write([sample])
    first, *rows = csv.reader((tmp_path / "log.csv").read_text().splitlines())
    assert ",".join(first[:7]) == (
        "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,"
        "cycle_time_ms,tensor_fusion_threshold,score"
    )
    assert len(rows) == len(samples)
    assert rows[0][:6] == ["1", "0", "0", "1", "1", "128"]
    assert [float(rows[-1][4]), float(rows[-1][5])] == [
        kept.cycle_time_ms, kept.fusion_threshold_bytes / MIB,
    ]  # fmt: skip


def test_a_log_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hvdlite"):
        log = AutotuneLog(str(tmp_path / "nowhere" / "log.csv"))
        log.write([Sample(Retune(1, 1.0, 1, "", PIECE_BYTES), False, 1.0)])
    assert caplog.text.count("without HVDLITE_AUTOTUNE_LOG") == 1


# -- all ranks switch


def ask(coordinator: Coordinator, *names: str) -> tuple[object, ...]:
    requests = tuple(Request(0, name, "allreduce", "float32", (256,), "cpu") for name in names)
    coordinator.receive(Report(0, (0, 1), (), requests), 0.0)
    return coordinator.pop_orders()


def test_the_coordinator_decides_by_the_new_settings_after_the_order() -> None:
    coordinator = Coordinator(2, cache_capacity=8, threshold_bytes=1 << 20)
    (segment,) = ask(coordinator, "a", "b")
    assert isinstance(segment, Segment) and len(segment.items) == 2
    retune = Retune(1024, 1.0, 0, "ring", PIECE_BYTES)
    coordinator.retune(retune)
    assert coordinator.pop_orders() == (Eviction(0, 0), Eviction(0, 1), retune)
    alone = ask(coordinator, "a", "b")
    assert [len(each.items) for each in alone if isinstance(each, Segment)] == [1, 1]
    (item,) = alone[0].items  # type: ignore[attr-defined]
    assert isinstance(item, Response) and item.bit == -1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hosts", [None, [[0], [1]], [[0, 1], [2, 3]]])
def test_all_ranks_switch_between_the_same_two_segments(
    hosts: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 if hosts is not None and len(hosts[0]) == 2 else 2
    backends: list[str] = []
    choose = execution.choose

    def noted(*args: Any) -> Any:
        backend = choose(*args)
        backends.append(backend.name)
        return backend

    monkeypatch.setattr(execution, "choose", noted)
    turns = [
        Retune(0, 0.0, 0, "ring", 1 << 14),
        Retune(1 << 16, 2.0, 64, "auto", 1 << 20),
        Retune(1 << 26, 0.5, 3, "ring", PIECE_BYTES),
    ]

    def main(rank: int) -> tuple[list[bytes], list[int]]:
        engine = current().engine
        fused: list[int] = []

        def watch(run: SegmentRun) -> None:
            fused.append(len(run.names))
            if rank == 0 and len(fused) % 20 == 0 and turns:
                engine._control_plane.retune(turns.pop(0))

        end = engine.observe(watch)
        results = []
        for step in range(30):
            random = np.random.default_rng([step, rank])
            own = [random.standard_normal(1 + 1000 * k) for k in range(6)]
            handles = [hvd.allreduce_async(x, name=f"t{k}", op=hvd.Sum) for k, x in enumerate(own)]
            every = [np.random.default_rng([step, other]) for other in range(size)]
            for k, handle in enumerate(handles):
                result = hvd.synchronize(handle)
                expected = sum(random.standard_normal(1 + 1000 * k) for random in every)
                np.testing.assert_allclose(result, expected)
                results.append(result.tobytes())
        end()
        return results, fused

    outcomes = run_ranks(size, main, hosts=hosts)
    assert not turns
    assert all(outcome == outcomes[0] for outcome in outcomes)  # to the bit, and fused alike
    planes = {None: {"RING", "SHM"}, 1: {"RING", "FLAT"}, 2: {"RING", "HIERARCHICAL"}}
    assert set(backends) == planes[None if hosts is None else len(hosts[0])]
    assert {1} < set(outcomes[0][1])


@pytest.mark.timeout(120)
@pytest.mark.thorough
def test_a_job_is_tuned_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    config = Config(
        autotune=True, autotune_log=str(path), autotune_warmup_samples=1, autotune_max_samples=3,
        autotune_steps_per_sample=1,
    )  # fmt: skip

    def main(rank: int) -> None:
        pair = hvd.add_process_set([0, 2])
        for step in range(140):
            values = np.full(5000, rank + step, np.float64)
            handles = [hvd.allreduce_async(values, name=f"t{k}", op=hvd.Sum) for k in range(3)]
            if rank in (0, 2):
                hvd.allreduce(values, name="pair", op=hvd.Sum, process_set=pair)
            for handle in handles:
                np.testing.assert_array_equal(hvd.synchronize(handle), 6.0 + 4 * step)

    run_ranks(4, main, hosts=[[0, 1], [2, 3]], config=config)
    header, *rows = csv.reader(path.read_text().splitlines())
    assert len(rows) >= 3 + 1 + 2 + 1  # joint, plane, pieces, cache
    assert rows[0][:6] == ["1", "0", "0", "1", "1", "128"]
    assert rows[-1][:6] in [row[:6] for row in rows[:-1]]
    assert all(float(row[header.index("score")]) > 0 for row in rows)
