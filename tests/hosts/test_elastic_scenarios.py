"""The scenarios of elastic jobs that are written once for all sites, on three hosts.

Pytest collects here what is imported, with the fixtures of this folder.
"""

from __future__ import annotations

import pytest

from tests.launcher.elastic.test_limits import (  # noqa: F401 - pytest collects it here
    test_a_rank_that_exits_early_leaves_the_rest_to_the_others,
    test_a_stopped_worker_is_given_up_and_harms_nothing,
    test_an_error_of_one_rank_is_made_good,
    test_an_exception_on_every_rank_ends_the_job,
    test_an_exception_that_comes_again_ends_the_job,
    test_missing_slots_end_the_job_after_the_elastic_timeout,
    test_two_changes_of_hosts_need_two_resets,
)
from tests.launcher.elastic_scenarios.test_hosts import (  # noqa: F401 - pytest collects it here
    test_a_discovery_script_that_goes_wrong_later_changes_nothing,
    test_a_discovery_script_that_hangs_later_is_killed_and_asked_again,
    test_a_host_that_fails_comes_back_after_its_cooldown_again_and_again,
    test_a_host_whose_processes_die_is_lost_at_once,
    test_a_signal_to_the_launcher_in_a_reset_leaves_nothing,
    test_hosts_and_slots_come_and_go,
    test_without_a_range_a_host_that_fails_never_comes_back,
)
from tests.launcher.elastic_scenarios.test_kills import (  # noqa: F401 - pytest collects it here
    test_many_kills,
)
from tests.launcher.elastic_scenarios.test_records import (  # noqa: F401 - pytest collects it here
    test_nothing_that_was_written_is_overwritten,
)
from tests.launcher.elastic_scenarios.test_strangers import (  # noqa: F401 - pytest collects it here
    test_training_is_not_disturbed,
)
from tests.launcher.elastic_scenarios.test_worlds import (  # noqa: F401 - pytest collects it here
    test_a_failure_without_newcomers_sends_no_weights,
    test_a_host_that_leaves_costs_nothing,
    test_a_rank_and_the_newcomer_in_its_place,
    test_a_rank_that_is_stopped_in_a_collective,
    test_below_min_np_until_capacity_returns_seconds_later,
    test_collectives_of_all_kinds_in_flight,
    test_old_hosts_serve_until_the_newcomers_have_their_state,
    test_several_ranks_at_once_and_up_again,
    test_shapes_that_ranks_disagree_about_reset_nothing,
    test_the_size_goes_from_four_to_three_to_five,
)

pytestmark = pytest.mark.timeout(120)
