"""Who makes the others wait, and why: decided on numbers that are known."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.metrics import METRICS
from hvdlite.launcher.live import stragglers
from hvdlite.launcher.live.stragglers import LOOKS, SILENT_SECONDS, Pace, Straggler, Watch, find

STEPS = 50


def pace(rank: int, host: str = "a", steps: int = STEPS, **each: float) -> Pace:
    """A rank by what it does in each step of 122 ms: of these it waits what is left.

    Names are those of counters without `_seconds_total`, in ms, or whole ones; `now` are values.
    """
    whole = each.pop("whole", 122.0)
    now = {name: each.pop(name) for name in list(each) if not METRICS[full(name)].counts}
    own = each.get("compute", 0.0) + each.get("data", 0.0)
    each.setdefault("peers_waited", whole - own)
    each.setdefault("exchange_waited", max(whole - own, 0.0))
    each["step"] = whole
    changes = {full(name): value * steps * scale(name) for name, value in each.items()}
    values = {"cores": 2.0, "runnable_processes": 2.0, "core_speed": 70.0, **now}
    return Pace(rank, host, steps * whole / 1000, {"steps_total": float(steps), **changes}, values)


def full(name: str) -> str:
    return next(n for n in (f"{name}_seconds_total", f"{name}_total", name) if n in METRICS)


def scale(name: str) -> float:
    return 1e-3 if full(name).endswith("_seconds_total") else 1.0


def found(*paces: Pace) -> Straggler:
    straggler = find(paces)
    assert straggler is not None
    return straggler


def three(**slow: float) -> Straggler:
    """Rank 3 of host b, beside three ranks that compute for 84 ms."""
    others = [pace(rank, "ab"[rank // 2], compute=84.0, samples=32) for rank in range(3)]
    return found(*others, pace(3, "b", **{"compute": 122.0, "samples": 32, **slow}))


def test_slow_compute_for_a_reason_that_nobody_knows() -> None:
    straggler = three()
    assert straggler[:2] == ((3,), "b")
    assert straggler.seconds == pytest.approx(0.038)
    assert straggler.cause == stragglers.COMPUTE
    assert straggler.text == (
        "rank 3 (host b) makes the others wait 38 ms a step (31%): its compute takes 122 ms, "
        "theirs 84 ms"
    )


def test_a_busy_core() -> None:
    straggler = three(core_waited=36.0, runnable_processes=4)
    assert straggler.cause == stragglers.CORE
    assert straggler.text.endswith(
        "theirs 84 ms; its main thread waits 36 ms longer for a core; its host has 2 runnable "
        "processes more than cores"
    )
    # Threads of a library wait, and the main one for them.
    slow, others = pace(1, "b", compute=122.0, runnable_processes=3), pace(0, "a", compute=84.0)
    straggler = found(others, slow)
    assert straggler.cause == stragglers.CORE
    assert straggler.text.endswith("theirs 84 ms; its host has 1 runnable process more than cores")
    beside = pace(2, "b", compute=84.0)
    assert found(others, slow, beside).cause == stragglers.COMPUTE, "it has the same cores"


def test_a_lower_clock() -> None:
    straggler = three(core_speed=49.0)
    assert straggler.cause == stragglers.CLOCK
    assert straggler.text.endswith("its core runs at 70% of the speed of theirs")
    assert three(compute=84.0, data=38.0, core_speed=62.0).cause == stragglers.DATA


def test_a_slow_data_loader() -> None:
    straggler = three(compute=84.0, data=38.0)
    assert straggler.cause == stragglers.DATA
    assert straggler.text.endswith("(31%): its data takes 38 ms, theirs 0 ms")


def test_swapping() -> None:
    straggler = three(major_faults=50.0, swap_bytes=300 << 20)
    assert straggler.cause == stragglers.SWAP
    assert straggler.text.endswith(
        "410 pages a second are read from disk, and 300 MiB are swapped out: its host is short of "
        "memory"
    )
    mapped = three(major_faults=50.0).text
    assert mapped.endswith("its host is short of memory, or its steps read files that are mapped")


def test_more_work() -> None:
    straggler = three(samples=48)
    assert straggler.cause == stragglers.BATCHES
    assert straggler.text.endswith("its batches have 48 rows, theirs 32")
    assert three(samples=34).cause == stragglers.COMPUTE, "two rows do not explain so much"
    assert three(compute=84.0, data=38.0, samples=34).cause == stragglers.DATA


def test_garbage_collection() -> None:
    straggler = three(gc=30.0)
    assert straggler.cause == stragglers.GARBAGE
    assert straggler.text.endswith("Python's garbage collection takes 30 ms of it")


def test_a_whole_host_is_slow() -> None:
    paces = [pace(rank, "ab"[rank // 4], compute=[80.0, 120.0][rank // 4]) for rank in range(8)]
    straggler = found(*paces)
    assert straggler.text.startswith("ranks 4-7 (host b) make the others wait 40 ms a step")
    assert "their compute takes 120 ms, that of the others 80 ms" in straggler.text
    assert found(pace(0, "a", compute=122.0), pace(1, "b", compute=80.0)).ranks == (0,)


def link(hosts: int = 2, *, again: str = "", **of_b: float) -> list[Pace]:
    """Hosts of two ranks that compute alike, and exchange for long; of `again`, both send again."""
    each = {"compute": 60.0, "peers_waited": 10.0}
    return [
        pace(rank, host, **{**each, **({"retransmits": 5.0} if host in again else {}), **more})
        for rank in range(2 * hosts)
        for host in "abcd"[rank // 2]
        for more in ([of_b] if host == "b" else [{}])
    ]


def test_a_slow_link() -> None:
    straggler = found(*link(peers_waited=40.0))
    assert (straggler.ranks, straggler.host, straggler.cause) == ((2, 3), "b", stragglers.LINK)
    assert "answers reach their host 30 ms later than others" in straggler.text
    assert find(link()) is None


def test_a_link_that_loses_packets() -> None:
    for again in ("a", "b", "ab"):  # With two hosts this tells nothing of them.
        straggler = found(*link(again=again))
        assert (straggler.ranks, straggler.cause) == ((0, 1, 2, 3), stragglers.LINK)
        assert straggler.text == (
            "the link between hosts a and b makes all ranks wait 62 ms a step (51%): "
            f"{41 * len(again)} TCP segments a second are sent again"
        )
    straggler = found(*link(3, again="b"))
    assert (straggler.ranks, straggler.host, straggler.cause) == ((2, 3), "b", stragglers.LINK)
    assert "their host sends 41 TCP segments a second again, so their link" in straggler.text
    assert found(*link(4, again="bd")).text.startswith("the link between hosts b and d makes all")
    assert find(link(4, again="abcd")) is None, "all do, as where much is sent"


def test_nobody_is_slow() -> None:
    random.seed(3)
    for _ in range(50):  # Whoever is late differs from step to step.
        paces = [pace(rank, compute=100.0 + random.uniform(-4, 4)) for rank in range(8)]
        assert find(paces) is None
    assert find([pace(0, compute=100.0)]) is None
    assert find([pace(0, compute=122.0, steps=2), pace(1, compute=80.0, steps=2)]) is None
    quick = [pace(rank, compute=[20.0, 120.0][rank > 0]) for rank in range(4)]
    assert find(quick) is None, "one is quick, and three are not slow"


def test_loops_without_steps() -> None:
    def waits(rank: int, seconds: float) -> Pace:
        return Pace(rank, "a", 10.0, {"peers_waited_seconds_total": seconds}, {})

    straggler = found(waits(0, 3.2), waits(1, 0.1), waits(2, 3.0))
    assert straggler.text == (
        "rank 1 (host a) makes the others wait 300 ms a second (30%): steps are not counted"
    )


def test_a_rank_is_named_once_and_not_for_a_moment() -> None:
    slow = [pace(0, compute=84.0), pace(1, compute=122.0)]
    well = [pace(0, compute=84.0), pace(1, compute=84.0)]
    watch = Watch()
    said = [watch.look(paces, float(now)) for now, paces in enumerate([slow, well, slow, slow])]
    assert said == [None] * 4 and watch.current is None
    named = watch.look(slow, 4.0)
    assert named is not None and named.ranks == (1,) and watch.current == named
    assert LOOKS < 10, "else nobody is named in time"
    assert [watch.look(slow, 5.0 + n) for n in range(20)] == [None] * 20
    assert watch.current is not None
    assert watch.look(slow, 5.0 + SILENT_SECONDS) is not None


NUMBERS = st.dictionaries(st.sampled_from(sorted(METRICS)), st.floats(0, 1e17), max_size=12)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 60), NUMBERS, NUMBERS), max_size=6))
def test_whatever_is_counted(
    ranks: list[tuple[str, float, dict[str, float], dict[str, float]]],
) -> None:
    paces = [Pace(rank, *fields) for rank, fields in enumerate(ranks)]
    straggler = find(paces)
    if straggler is not None:
        assert set(straggler.ranks) <= set(range(len(ranks)))
        assert straggler.cause in stragglers.CAUSES
        assert math.isfinite(straggler.share)
