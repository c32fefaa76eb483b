"""GPUs that Spark gives to tasks. The last module of this folder, by its name: what the first
session of a process is told of GPUs stays in its Java for all others."""

from __future__ import annotations

from pathlib import Path

import hvdlite.spark
from hvdlite.spark.task import get_available_devices
from tests.spark.sessions import session


def test_each_rank_knows_the_gpu_of_its_task(tmp_path: Path) -> None:
    script = tmp_path / "gpus.sh"  # the GPU of each executor is but a name
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["5"]}'\n""")
    script.chmod(0o755)
    gpus = {"spark.task.resource.gpu.amount": "1"}
    for owner in ("worker", "executor"):
        gpus[f"spark.{owner}.resource.gpu.amount"] = "1"
        gpus[f"spark.{owner}.resource.gpu.discoveryScript"] = str(script)
    with session("local-cluster[2,1,600]", **gpus):
        assert hvdlite.spark.run(get_available_devices, num_proc=2) == [["5"]] * 2
