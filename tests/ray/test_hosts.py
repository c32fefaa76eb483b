"""RayExecutor on two Ray nodes, both of this machine, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cluster_programs import reduced
from tests.parallel.jobs import environment

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

SCRIPT = """
import json, ray
from ray.cluster_utils import Cluster
from hvdlite.ray import RayExecutor
from tests.cluster_programs import reduce

def node():
    return ray.get_runtime_context().get_node_id()

small = dict(num_cpus=2, object_store_memory=80_000_000)
cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
cluster.add_node(**small)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
try:
    executor = RayExecutor(num_hosts=2, num_workers_per_host=2)
    executor.start()
    said = [executor.run(node), executor.run(reduce, args=[1])]
    executor.shutdown()
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    try:
        RayExecutor(settings, num_hosts=3).start()
    except TimeoutError as error:
        print(json.dumps([*said, str(error)]))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_workers_are_spread_evenly_over_nodes_and_those_of_one_are_neighbours() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**environment(), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    nodes, sums, error = json.loads(done.stdout.splitlines()[-1])
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert [tuple(each) for each in sums] == reduced(4, 1)
    assert "no room for 3 workers in 1 s" in error and "STRICT_SPREAD" in error
