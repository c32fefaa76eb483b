"""Optimizers from world to world: what was learned of a world is forgotten with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.fake_driver import STOP
from tests.elastic.test_worlds import in_world
from tests.elastic.workers import job

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240)]

MODULE = "worker_torch"
VARIANTS = {
    "auto": {"HVDLITE_SEGMENTATION": "auto"},
    "autotune": {"HVDLITE_AUTOTUNE": "1", "HVDLITE_AUTOTUNE_STEPS_PER_SAMPLE": "2"},
    # Communicators are aborted and made anew; most of what is cached is evicted before it returns.
    "devices, small cache": {"HVDLITE_DEVICES": "gloo", "HVDLITE_CACHE_CAPACITY": "4"},
}


@pytest.mark.parametrize(
    ("variant", "hosts"),
    [
        pytest.param("auto", "a,b,b,a", marks=pytest.mark.soak),
        ("autotune", "a,b,b,a"),
        ("devices, small cache", ""),
    ],
)
def test_weights_stay_equal_while_worlds_change(tmp_path: Path, variant: str, hosts: str) -> None:
    """4, 3, 4 and 3 ranks; newcomers know nothing of what the others have tuned."""
    variables = VARIANTS[variant]
    with job(tmp_path, 3, MODULE, hosts=hosts, **variables) as workers:
        driver = workers.driver
        driver.size, driver.admits = 1, False
        for number in range(3):
            workers.wait_for(number, in_world(1, step=50), 60)
        workers.kill(0)
        for number in (1, 2):
            workers.wait_for(number, in_world(2, step=50), 60)
        workers.start(3, MODULE, **variables)
        driver.wait_for(lambda: 3 in driver.commits, 60)
        driver.notice(2)
        for number in (1, 2, 3):
            workers.wait_for(number, in_world(3, step=50), 60)
        workers.kill(2)
        for number in (1, 3):
            workers.wait_for(number, in_world(4, step=20), 60)
        driver.notice(STOP)
        assert {workers.processes[number].wait(20) for number in (1, 3)} == {0}, workers.output(
            1
        ) + workers.output(3)
        digests: dict[tuple[int, int], set[str]] = {}
        for number in range(4):
            for line in workers.lines(number):
                if "digest" in line:
                    digests.setdefault((line["epoch"], line["step"]), set()).add(line["digest"])
        assert {key for key, values in digests.items() if len(values) > 1} == set()
        assert {epoch for epoch, _ in digests} == {1, 2, 3, 4}
