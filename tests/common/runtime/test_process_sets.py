"""Process sets as objects: what happens when they are copied, or sent to another process."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import pytest

from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_the_set_of_all_ranks_is_the_same_everywhere(dumps: object) -> None:
    assert callable(dumps)
    assert pickle.loads(dumps({"set": global_process_set}))["set"] is global_process_set
    assert copy.deepcopy([global_process_set])[0] is global_process_set
    assert copy.copy(global_process_set) is global_process_set


def test_any_other_set_is_copied_with_its_ranks() -> None:
    evens = ProcessSet([2, 0])
    for copied in (pickle.loads(pickle.dumps(evens)), copy.deepcopy(evens)):
        assert copied is not evens
        assert (copied.ranks, copied.process_set_id) == ([0, 2], None)
