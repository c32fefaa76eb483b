"""Small tensors inside request and response, in jobs of several hosts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.engine.executor import Executor
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from tests.ranks import run_ranks
from tests.worlds import IN_PROCESS, TCP

pytestmark = pytest.mark.timeout(120)

HOSTS: dict[str, list[list[int]]] = {
    "1+1": [[0], [1]],
    "2+2": [[0, 1], [2, 3]],
    "3+1+2": [[0, 2, 5], [1], [3, 4]],
    "1+1+1": [[0], [1], [2]],
}
TREE = [[0, 1], [2, 3, 4]]


def noise(rank: int, salt: int = 0, size: int = 9) -> Any:
    """Values whose sum depends on the order of summation."""
    random = np.random.default_rng([rank, salt])
    values = random.standard_normal(size) * 10.0 ** random.integers(-3, 4, size)
    return values.astype(np.float32)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts how often the data plane has run for a tensor, on all ranks."""
    counts: Counter[str] = Counter()
    lock, run = threading.Lock(), Executor._run

    def counted(self: Executor, request: Any, *args: Any) -> None:
        with lock:
            counts[request.name] += 1
        run(self, request, *args)

    monkeypatch.setattr(Executor, "_run", counted)
    yield counts


@pytest.mark.parametrize(
    ("name", "transport"), [*((name, IN_PROCESS) for name in HOSTS), ("3+1+2", TCP)]
)
def test_a_name_that_comes_again_needs_no_round_and_has_the_same_bits(
    name: str, transport: str, moved: Counter[str]
) -> None:
    hosts = HOSTS[name]
    size = sum(map(len, hosts))

    def main(rank: int) -> list[bytes]:
        sums = [hvd.allreduce(noise(rank), name="t", op=hvd.Sum) for _ in range(4)]
        average = hvd.allreduce(noise(rank), name="u")
        in_place = noise(rank)
        for _ in range(2):
            in_place[:] = noise(rank)
            hvd.allreduce_(in_place, name="v", op=hvd.Sum)
        np.testing.assert_allclose(average, sums[0] / size, rtol=1e-6, atol=1e-6)
        return [each.tobytes() for each in (*sums, in_place)]

    found = run_ranks(size, main, hosts=hosts, transport=transport)
    assert {bits for each in found for bits in each} == {found[0][0]}
    wanted = np.sum([noise(rank).astype(np.float64) for rank in range(size)], axis=0)
    np.testing.assert_allclose(np.frombuffer(found[0][0], np.float32), wanted, rtol=1e-5, atol=1e-2)
    assert moved == {f"allreduce.{name}": size for name in "tuv"}


def test_a_rank_that_reports_several_at_once_lets_all_take_the_data_plane(
    moved: Counter[str],
) -> None:
    """And the bits are the same, whichever way they take."""

    def main(rank: int) -> set[bytes]:
        found = []
        for step in range(6):
            if rank == step % 5:
                entries = [hvd.allreduce_async(noise(rank, n), name=f"t{n}") for n in range(3)]
                found.append([hvd.synchronize(each) for each in entries])
            else:
                found.append([hvd.allreduce(noise(rank, n), name=f"t{n}") for n in range(3)])
        return {b"".join(each.tobytes() for each in step) for step in found}

    results = run_ranks(5, main, hosts=TREE)
    assert len(set.union(*results)) == 1
    assert set(moved) == {f"allreduce.t{n}" for n in range(3)}


def test_process_sets_joins_and_evictions() -> None:
    def main(rank: int) -> list[Any]:
        across = hvd.add_process_set([1, 2, 4])
        inside = hvd.add_process_set([2, 3, 4])
        found: list[Any] = []
        for turn in range(3):
            for number in range(3):  # More names than the cache has room for.
                value = np.array([float(rank + number)])
                found.append(hvd.allreduce(value, name=f"all{number}", op=hvd.Sum)[0])
            for name, ranks in (("across", across), ("inside", inside)):
                if ranks.included():
                    value = np.array([float(rank)])
                    one = hvd.allreduce(value, name=name, op=hvd.Sum, process_set=ranks)
                    found.append(one[0])
            for _ in range(2) if turn == rank else range(3):  # One call less than the others.
                hvd.allreduce(np.ones(2), name="uneven", op=hvd.Sum)
            found.append(hvd.join() >= 0)
        return found

    config = Config(cache_capacity=2)
    for settings in (config, Config()):
        for rank, found in enumerate(run_ranks(5, main, hosts=TREE, config=settings)):
            own = [10.0, 15.0, 20.0, *[7.0] * (rank in (1, 2, 4)), *[9.0] * (rank in (2, 3, 4))]
            assert found == [*own, True] * 3


def test_ranks_that_disagree_are_named_and_the_next_call_is_right() -> None:
    def main(rank: int) -> tuple[str, list[float]]:
        for _ in range(2):
            hvd.allreduce(np.ones(2), name="t")
        with pytest.raises(HorovodInternalError) as raised:
            hvd.allreduce(np.ones(3 if rank == 3 else 2), name="t")
        return str(raised.value), [
            float(hvd.allreduce(np.full(2, rank), name="t", op=hvd.Sum)[0]) for _ in range(3)
        ]

    for text, sums in run_ranks(5, main, hosts=TREE):
        assert "rank 0 has (2,), rank 3 has (3,)" in text
        assert sums == [10.0] * 3


@pytest.mark.parametrize("leaver", [1, 2, 4])
def test_who_waits_for_a_rank_that_has_left_is_told(leaver: int) -> None:
    left = threading.Event()

    def main(rank: int) -> str:
        for _ in range(2):
            hvd.allreduce(np.ones(2), name="t")
        if rank == leaver:
            current().shutdown()
            left.set()
            return ""
        if rank % 2:
            assert left.wait(20)  # Some have sent their data before, others send it later.
        with pytest.raises(HorovodInternalError) as raised:
            hvd.allreduce(np.ones(2), name="t")
        return str(raised.value)

    texts = run_ranks(5, main, hosts=TREE, config=Config(stall_check_disable=True))
    for rank, text in enumerate(texts):
        assert rank == leaver or f"rank {leaver} has been shut down" in text


@pytest.mark.parametrize("setting", ["ring", "trees", "hierarchical"])
def test_an_algorithm_that_was_named_is_the_one_that_runs(
    setting: str, moved: Counter[str]
) -> None:
    def main(rank: int) -> None:
        for _ in range(3):
            hvd.allreduce(noise(rank), name="t")

    run_ranks(4, main, hosts=[[0, 1], [2], [3]], config=Config(allreduce=setting))
    assert moved == {"allreduce.t": 12}


def test_a_call_that_no_backend_runs_fails_alone_each_time() -> None:
    def main(rank: int) -> tuple[list[str], list[bool]]:
        texts, goes_on = [], []
        for _ in range(3):
            with pytest.raises(HorovodInternalError) as raised:
                hvd.allreduce(np.ones(2), name="t")
            texts.append(str(raised.value))
            goes_on.append(raised.value.job_goes_on)
        hvd.barrier()
        return texts, goes_on

    for texts, goes_on in run_ranks(2, main, hosts=HOSTS["1+1"], config=Config(allreduce="shm")):
        assert all("HVDLITE_ALLREDUCE=shm cannot run allreduce" in text for text in texts)
        assert goes_on == [True] * 3


def test_large_tensors_and_other_collectives_take_the_data_plane(moved: Counter[str]) -> None:
    def main(rank: int) -> None:
        for _ in range(3):
            hvd.allreduce(np.ones(1000), name="large")
            hvd.broadcast(np.ones(2), 0, name="b")
            hvd.grouped_allreduce([np.ones(2), np.ones(3)], name="g")

    run_ranks(4, main, hosts=HOSTS["2+2"])
    assert moved["allreduce.large"] == moved["broadcast.b"] == 12
    assert sum(count for name, count in moved.items() if "grouped" in name) == 12
