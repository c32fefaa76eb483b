"""The job of thousands of ranks, with a few: that it does what is timed."""

from __future__ import annotations

from tests.simulation.scale import TENSORS, Large, LargeDriver


def test_steps_and_the_loss_of_a_host() -> None:
    job = Large(64)
    job.step()
    virtual, _ = job.step()
    assert {rank.answered for rank in job.ranks} == {2 * TENSORS}
    assert 0 < virtual < 1
    job.lose_host()
    assert all(rank.failed for rank in job.ranks)


def test_the_driver_starts_a_job_and_goes_on_without_a_host() -> None:
    driver = LargeDriver(64)
    driver.start()
    driver.lose_host()
