"""Ray Train: hvdlite as a backend of its own, and inside TorchTrainer."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster_programs import reduce, reduced, train, trained

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
HvdliteConfig: Any = importlib.import_module("hvdlite.ray").HvdliteConfig
pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray Train imports Ray Data, which sets fields of its own that it calls deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def write_results(config: dict[str, str]) -> None:
    """Leave this rank's results in a file."""
    sums, weights = reduce(1), train(3)
    Path(config["folder"], f"{sums[0]}.json").write_text(json.dumps([sums, weights]))


def fail(config: dict[str, str]) -> None:
    import hvdlite.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("mine")
    hvd.allreduce(np.ones(2), name="never")


def arguments(folder: Path) -> dict[str, Any]:
    from ray.train import RunConfig, ScalingConfig

    return {
        "train_loop_config": {"folder": str(folder)},
        "scaling_config": ScalingConfig(num_workers=2),
        "run_config": RunConfig(storage_path=str(folder / "storage")),
    }


def check(folder: Path) -> None:
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert [tuple(sums) for sums, _ in results] == reduced(2, 1)
    assert results[0][1] == results[1][1]
    np.testing.assert_allclose(results[0][1], trained(2, 3), rtol=1e-12)


def test_hvdlite_is_a_backend_of_ray_train(tmp_path: Path) -> None:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    config = HvdliteConfig(timeout_s=30)
    DataParallelTrainer(write_results, backend_config=config, **arguments(tmp_path)).fit()
    check(tmp_path)


def test_a_failing_worker_ends_the_training_with_its_error(tmp_path: Path) -> None:
    from ray.train import TrainingFailedError
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    with pytest.raises(TrainingFailedError, match="mine"):
        DataParallelTrainer(fail, backend_config=HvdliteConfig(), **arguments(tmp_path)).fit()


@pytest.mark.torch
def test_torch_trainer_works_as_it_is(tmp_path: Path) -> None:
    from ray.train.torch import TorchTrainer

    TorchTrainer(write_results, **arguments(tmp_path)).fit()
    check(tmp_path)


def test_the_settings_are_shown() -> None:
    config = HvdliteConfig(timeout_s=5, nics=["lo"])
    assert config.to_dict() == {"timeout_s": 5, "nics": ["lo"]}
    assert "RANK" not in os.environ
