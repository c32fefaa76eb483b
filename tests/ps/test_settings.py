"""The environment of the processes of a cluster."""

from __future__ import annotations

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.ps.cluster.settings import ClusterSettings, address_towards, read_settings

OWN = {
    "HVDLITE_ROLE": "server", "HVDLITE_SCHEDULER": "node1:4242", "HVDLITE_NUM_SERVERS": "2",
    "HVDLITE_NUM_WORKERS": "4", "HVDLITE_NODE_ID": "s1", "HVDLITE_PS_TOKEN": "secret",
}  # fmt: skip
MINDSPORE = {
    "MS_ROLE": "MS_PSERVER", "MS_SCHED_HOST": "node1", "MS_SCHED_PORT": "4242",
    "MS_SERVER_NUM": "2", "MS_WORKER_NUM": "4", "MS_NODE_ID": "s1",
}  # fmt: skip
PS_LITE = {
    "DMLC_ROLE": "server", "DMLC_PS_ROOT_URI": "node1", "DMLC_PS_ROOT_PORT": "4242",
    "DMLC_NUM_SERVER": "2", "DMLC_NUM_WORKER": "4",
}  # fmt: skip


def test_all_names_mean_the_same() -> None:
    own = read_settings(OWN)
    assert own == ClusterSettings("server", "node1:4242", 2, 4, "s1", b"secret", True)
    assert read_settings({**MINDSPORE, "HVDLITE_PS_TOKEN": "secret"}) == own
    assert read_settings({**PS_LITE, **OWN}) == own
    found = read_settings(PS_LITE)
    assert found is not None and found.scheduler == "node1:4242"


def test_a_process_without_a_role_is_in_no_cluster() -> None:
    assert read_settings({"MS_SCHED_HOST": "node1"}) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"HVDLITE_ROLE": "boss"}, "HVDLITE_ROLE=boss: give scheduler, server or worker"),
        ({"HVDLITE_NUM_SERVERS": "0"}, "HVDLITE_NUM_SERVERS=0: give how many"),
        ({"HVDLITE_NUM_WORKERS": "two"}, "HVDLITE_NUM_WORKERS=two"),
        ({"HVDLITE_NUM_WORKERS": ""}, "HVDLITE_NUM_WORKERS=: give how many"),
        ({"HVDLITE_SCHEDULER": "node1:70000"}, "HVDLITE_SCHEDULER=node1:70000: .* 1 to 65535"),
        ({"HVDLITE_SCHEDULER": ""}, "HVDLITE_SCHEDULER=: give the scheduler's host"),
        ({"HVDLITE_SCHEDULER": "node1"}, "HVDLITE_SCHEDULER=node1: give the scheduler's host"),
        ({"HVDLITE_SCHEDULER": "", "MS_SCHED_HOST": "n", "MS_SCHED_PORT": "0"}, "MS_SCHED_PORT=0"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings(OWN | changes)


def test_the_address_of_this_host_depends_on_the_way() -> None:
    assert address_towards("127.0.0.1:80") == "127.0.0.1"
    assert address_towards("[::1]:80") == "[::1]"
