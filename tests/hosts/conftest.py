"""The lab, once for all tests; after each of them nothing may be left in its hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.build import build
from tests.hosts.lab import CannotBuildError, Lab
from tests.hosts.sites import ThreeHosts


@pytest.fixture(scope="session")
def hosts() -> Iterator[Lab]:
    """Three hosts, as they are before any test."""
    try:
        lab = build()
    except CannotBuildError as why:
        pytest.skip(f"no simulated hosts: {why}")
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture
def lab(hosts: Lab) -> Iterator[Lab]:
    """Three hosts; the test must leave no process and no temporary file in any of them."""
    yield hosts
    left = hosts.left()
    hosts.clear()
    assert left == {}


@pytest.fixture
def site(lab: Lab) -> ThreeHosts:
    """The three hosts as the site of a scenario."""
    return ThreeHosts(lab)
