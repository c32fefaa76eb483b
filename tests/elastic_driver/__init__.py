"""Tests of the decisions about elastic jobs, by steps that several of them make."""

from __future__ import annotations

from tests.simulation.elastic.by_hand import JobByHand


def grow(job: JobByHand) -> None:
    """Let newcomers be ready, and the others come to their next check."""
    job.newcomers_ready()
    job.pass_checks()


def results_of(job: JobByHand) -> tuple[int, tuple[int, ...]]:
    """Return exit code and results of a job that has ended."""
    assert job.finish is not None
    return job.finish.code, job.finish.results


def waiting_for_hello(hosts: dict[str, int], **plan: object) -> JobByHand:
    """Return a job whose first workers have been started, and say nothing yet."""
    job = JobByHand(**{"num_proc": sum(hosts.values()), **plan})
    job.slow_workers = True
    job.discover(hosts)
    return job
