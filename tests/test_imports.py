"""What is off is not imported: a job pays only for what it uses."""

from __future__ import annotations

import sys

import pytest

from tests.forks import NUMPY, TORCH
from tests.parallel.jobs import run_command

TRAIN = """
import tests.lean
import sys, torch
import hvdlite.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), {options})
for _ in range(2):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ENGINE = """
import sys
from tests.ranks import run_ranks
from hvdlite.common.settings.config import Config
run_ranks(2, lambda rank: None, config=Config(autotune={autotune}))
"""


def imported(program: str, module: str, preload: tuple[str, ...] = NUMPY) -> bool:
    """Whether a process that has imported `preload` has a module after it has run a program."""
    words = [sys.executable, "-c", f"{program}\nprint('{module}' in sys.modules)"]
    done = run_command(words, timeout=60, preload=preload)
    assert done.returncode == 0, done.stdout
    return done.stdout.split()[-1] == "True"


@pytest.mark.parametrize("autotune", [False, True])
@pytest.mark.thorough
def test_autotuning_is_imported_where_it_is_on(autotune: bool) -> None:
    program = ENGINE.format(autotune=autotune)
    assert imported(program, "hvdlite.common.engine.autotuning") is autotune


@pytest.mark.parametrize(
    ("names", "module"),
    [
        ("hvdlite.ray import RayExecutor, ray_logger", "ray"),
        ("hvdlite.spark import run", "pyspark"),
    ],
)
@pytest.mark.thorough
def test_ray_and_spark_are_imported_where_something_starts(names: str, module: str) -> None:
    assert not imported(f"import sys\nfrom {names}", module)


@pytest.mark.thorough
def test_slices_of_data_are_imported_when_they_are_asked_for() -> None:
    """By hvd.data, which the golden files of test_public_api show for each framework."""
    program = (
        "import sys, hvdlite.numpy as hvd\nassert 'hvdlite.data' not in sys.modules\n"
        "assert hvd.data.slice_batch and hvd.data is sys.modules['hvdlite.data']"
    )
    assert imported(program, "hvdlite.data.slicing")


@pytest.mark.torch
@pytest.mark.parametrize("on", [False, True])
@pytest.mark.thorough
def test_the_fused_step_is_imported_where_gradients_lie_in_segments(on: bool) -> None:
    pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    program = TRAIN.format(options=f"gradient_as_bucket_view={on}")
    assert imported(program, "hvdlite.torch.optimizer.fused_step", TORCH) is on


@pytest.mark.parametrize(
    ("program", "package", "remedy"),
    [
        ("import hvdlite.torch", "torch", "'hvdlite[torch]'"),
        ("import hvdlite.tensorflow", "tensorflow", "'hvdlite[tensorflow-cpu]'"),
        ("import hvdlite.keras", "keras", "'hvdlite[tensorflow-cpu]'"),
        ("import hvdlite.spark\nhvdlite.spark.run(print)", "pyspark", "'hvdlite[spark]'"),
        ("from hvdlite.ray import RayExecutor\nRayExecutor(num_workers=2).start()", "ray",
         "'hvdlite[ray]'"),
    ],
)  # fmt: skip
@pytest.mark.thorough
def test_a_framework_that_is_missing_is_named_with_its_extra(
    program: str, package: str, remedy: str
) -> None:
    words = [sys.executable, "-c", f"import sys\nsys.modules[{package!r}] = None\n{program}"]
    done = run_command(words, timeout=60, preload=NUMPY)
    error = f"import of {package} halted; None in sys.modules: pip install {remedy}"
    assert done.stdout.splitlines()[-1] == f"ModuleNotFoundError: {error}"
    assert done.stdout.count("Traceback") == 1
