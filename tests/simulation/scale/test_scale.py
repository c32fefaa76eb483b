"""The job of thousands of ranks, with a few: that it does what is timed."""

from __future__ import annotations

from tests.simulation.scale.large_job import TENSORS, Large, Start


def test_steps_and_the_loss_of_a_host() -> None:
    job = Large(64)
    job.step()
    virtual, _ = job.step()
    assert {rank.answered for rank in job.ranks} == {2 * TENSORS}
    assert 0 < virtual < 1
    assert 1e4 < job.root_bytes() < 1e7
    job.lose_host()
    assert all(rank.failed for rank in job.ranks)


def test_ranks_meet_without_a_host_that_is_lost_and_with_it_again() -> None:
    job = Start(64)
    for phase in (job.start, job.lose_host, job.have_it_back):
        row = phase()
        assert 0 < row.seconds < 1
        assert row.launcher > 0
        assert job.sent > 64 * 64  # Of each host: more than a byte of each rank.
    assert job.bytes_of_memory() > 0


def test_what_all_are_told_grows_with_ranks_times_hosts_at_most() -> None:
    """Each host is told of all ranks; what is alike in that is sent once."""
    small, large = Start(64), Start(256)
    small.start()
    large.start()
    assert large.sent < 2 * 4 * 4 * small.sent
    assert large.sent < 256 // 8 * 256 * 100
