"""The scenarios of trainings with servers that are written once for all sites, on three hosts."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the extra 'torch' is not installed")
from tests.hosts.clusters import ThreeHosts
from tests.hosts.lab import Lab
from tests.ps.test_scenarios import (
    test_a_killed_worker_returns_and_the_run_is_bitwise_undisturbed,
    test_a_server_killed_in_async_loses_no_more_than_two_intervals,
    test_a_server_killed_in_sync_leaves_the_run_bitwise,
    test_a_server_that_joins_takes_its_share_and_leaves_the_run_bitwise,
    test_a_slow_worker_is_waited_for_in_ssp,
    test_a_worker_that_joins_takes_part_while_another_one_stands,
    test_a_worker_that_stops_holds_nobody_up_in_async,
    test_a_worker_that_stops_holds_the_other_up_at_the_bound_in_ssp,
    test_idle_processes_use_no_processor,
    test_processes_are_started_with_the_names_of_others,
    test_servers_and_allreduce_differ_by_the_order_of_sums_alone,
    test_servers_and_allreduce_make_the_same_steps,
    test_steps_go_on_while_the_scheduler_is_away,
    test_sync_is_bitwise_one_process,
    test_workers_go_back_where_nobody_has_the_steps_of_a_killed_server,
)

pytestmark = pytest.mark.timeout(240)

__all__ = [  # Pytest collects them here, with the site below.
    "test_a_killed_worker_returns_and_the_run_is_bitwise_undisturbed",
    "test_a_server_killed_in_async_loses_no_more_than_two_intervals",
    "test_a_server_killed_in_sync_leaves_the_run_bitwise",
    "test_a_server_that_joins_takes_its_share_and_leaves_the_run_bitwise",
    "test_a_slow_worker_is_waited_for_in_ssp",
    "test_a_worker_that_joins_takes_part_while_another_one_stands",
    "test_a_worker_that_stops_holds_nobody_up_in_async",
    "test_a_worker_that_stops_holds_the_other_up_at_the_bound_in_ssp",
    "test_idle_processes_use_no_processor",
    "test_processes_are_started_with_the_names_of_others",
    "test_servers_and_allreduce_differ_by_the_order_of_sums_alone",
    "test_servers_and_allreduce_make_the_same_steps",
    "test_steps_go_on_while_the_scheduler_is_away",
    "test_sync_is_bitwise_one_process",
    "test_workers_go_back_where_nobody_has_the_steps_of_a_killed_server",
]


@pytest.fixture
def site(lab: Lab) -> ThreeHosts:
    """The three hosts, for the processes of a cluster."""
    return ThreeHosts(lab)
