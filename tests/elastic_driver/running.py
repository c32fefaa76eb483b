"""Simulated jobs that run, for the tests of failures."""

from __future__ import annotations

from tests.elastic_driver.simulation import Simulation


def running(hosts: dict[str, int], **plan: object) -> Simulation:
    job = Simulation(hosts, **{"min_np": 1, **plan})
    job.commit(4)
    return job


def finished(job: Simulation) -> tuple[int, str]:
    assert job.finish is not None
    return job.finish.code, job.finish.sentence
