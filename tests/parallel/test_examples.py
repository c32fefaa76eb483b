"""The examples do what they say, on one rank without mpirun and on two with hvdlite-run."""

from __future__ import annotations

import json
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvdlite.common.collectives.native.compiler import find_compiler
from hvdlite.tools.timeline_cli import main as timeline
from tests.parallel.jobs import MPIRUN, NO_MPIRUN, ROOT, run_command

pytestmark = pytest.mark.scripts
NEEDS_MPIRUN = pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN)
# One rank, where another example, or another backend of this one, shows the same.
RARELY = pytest.mark.soak
RANKS = [pytest.param(1, marks=RARELY), pytest.param(2, marks=NEEDS_MPIRUN)]
# Without the compiled code, init fails then.
NATIVE = {"HVDLITE_NATIVE": "on", "HVDLITE_TF_NATIVE": "on"} if find_compiler() else {}
TORCH = ("torch", {"KERAS_BACKEND": "torch", **NATIVE})
TENSORFLOW = (
    "tensorflow",
    {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", **NATIVE},
)
JAX = ("jax", {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", **NATIVE})
Framework = tuple[str, dict[str, str]]


def needs(*modules: str) -> None:
    """Skip the test where one of them is not installed."""
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def run(
    ranks: int, script: str, *words: object, launcher: tuple[str, ...] = (), **variables: str
) -> str:
    """The output of an example that ends well."""
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, words)]
    if ranks > 1:
        start = [sys.executable, "-m", "hvdlite.launcher", "-np", str(ranks), *launcher]
        command = [*start, *command]
    done = run_command(command, timeout=220, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    "script, framework, ranks",
    [
        pytest.param("torch_digits.py", TORCH, 1, id="torch-1", marks=RARELY),
        pytest.param("torch_digits.py", TORCH, 2, id="torch-2", marks=NEEDS_MPIRUN),
        pytest.param("tf_digits.py", TENSORFLOW, 1, id="tf-1", marks=RARELY),
        pytest.param("tf_digits.py", TENSORFLOW, 2, id="tf-2", marks=NEEDS_MPIRUN),
        pytest.param("jax_digits.py", JAX, 1, id="jax-1", marks=RARELY),
        pytest.param("jax_digits.py", JAX, 2, id="jax-2", marks=NEEDS_MPIRUN),
        pytest.param("keras_digits.py", TENSORFLOW, 1, id="keras-tf-1", marks=RARELY),
        pytest.param("keras_digits.py", TENSORFLOW, 2, id="keras-tf-2", marks=NEEDS_MPIRUN),
        pytest.param("keras_digits.py", TORCH, 1, id="keras-torch-1", marks=RARELY),
        pytest.param("keras_digits.py", TORCH, 2, id="keras-torch-2", marks=NEEDS_MPIRUN),
        pytest.param("keras_digits.py", JAX, 2, id="keras-jax-2", marks=NEEDS_MPIRUN),
    ],
)
def test_digits_are_read(script: str, framework: Framework, ranks: int, tmp_path: Path) -> None:
    module, variables = framework
    needs("sklearn", module)
    words: list[object] = []
    if script == "keras_digits.py":
        needs("keras")
        words = ["--checkpoint", tmp_path / "best.keras"]
    output = run(ranks, script, *words, **variables)
    found = re.findall(r"test accuracy ([\d.]+)%, \d+ images/s, ranks (\d+)", output)
    assert len(found) == 1, output
    assert float(found[0][0]) > 97 and int(found[0][1]) == ranks
    assert sorted(tmp_path.iterdir()) == words[1:]


@pytest.mark.parametrize(
    "script, framework, flag",
    [
        ("torch_digits.py", TORCH, "--epochs"),
        ("elastic_torch_digits.py", TORCH, "--epochs"),
        ("torch_fsdp_gpt.py", TORCH, "--print-every"),
        pytest.param("tf_digits.py", TENSORFLOW, "--epochs", marks=RARELY),
        pytest.param("elastic_tf_digits.py", TENSORFLOW, "--epochs", marks=RARELY),
        pytest.param("keras_digits.py", TENSORFLOW, "--epochs", marks=RARELY),
        pytest.param("elastic_keras_digits.py", TENSORFLOW, "--epochs", marks=RARELY),
        ("jax_digits.py", JAX, "--epochs"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    script: str, framework: Framework, flag: str
) -> None:
    module, variables = framework
    needs("sklearn", module)
    if "keras" in script:
        needs("keras")
    command = [sys.executable, str(ROOT / "examples" / script), flag, "0"]
    done = run_command(command, **variables)
    assert done.returncode == 2, done.stdout
    assert done.stdout.endswith(f"error: {flag} must be at least 1\n")


@pytest.mark.parametrize(
    ("mode", "workers"),
    [("sync", "mpi"), pytest.param("async", "independent", marks=RARELY)],
)
def test_digits_are_read_from_servers(mode: str, workers: str) -> None:
    needs("sklearn", "torch", "safetensors")
    flags = ("--ps-servers", "1", "--ps-workers", workers)
    words = "torch_ps_digits.py", "--mode", mode
    output = run(2, *words, launcher=flags, HVDLITE_LAUNCHER="ssh", **TORCH[1])
    found = re.findall(r"test accuracy ([\d.]+)%, \d+ steps/s, workers 2", output)
    assert len(found) == 1 and float(found[0]) > 93, output


@pytest.mark.parametrize(
    "script, framework, ranks",
    [
        pytest.param("elastic_torch_digits.py", TORCH, 1, marks=RARELY),
        pytest.param("elastic_torch_digits.py", TORCH, 2, marks=NEEDS_MPIRUN),
        ("elastic_tf_digits.py", TENSORFLOW, 1),
        ("elastic_keras_digits.py", TENSORFLOW, 1),
        ("elastic_keras_digits.py", TORCH, 1),
        ("elastic_keras_digits.py", JAX, 1),
    ],
    ids=["torch", "torch-2", "tf", "keras-tf", "keras-torch", "keras-jax"],
)
def test_elastic_examples_train_in_fixed_jobs_too(
    script: str, framework: Framework, ranks: int
) -> None:
    module, variables = framework
    needs("sklearn", module)
    if "keras" in script:
        needs("keras")
    output = run(ranks, script, "--epochs", 6, **variables)
    found = re.findall(r"test accuracy ([\d.]+)%, \d+ images/s, ranks (\d+)", output)
    assert len(found) == 1, output
    assert float(found[0][0]) > 94 and int(found[0][1]) == ranks


@pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN)
@pytest.mark.parametrize(
    "page, package, framework",
    [
        ("README.md", "torch", TORCH),
        ("docs/tensorflow.md", "tensorflow", TENSORFLOW),
        ("docs/jax.md", "jax", JAX),
        ("docs/keras.md", "keras", TENSORFLOW),
    ],
    ids=["torch", "tf", "jax", "keras"],
)
def test_the_first_script_of_each_page_runs(
    page: str, package: str, framework: Framework, tmp_path: Path
) -> None:
    module, variables = framework
    needs(package, module)
    script, *_ = re.findall(
        rf"```python\n(import {package}\b.*?)```", (ROOT / page).read_text(), re.S
    )
    (tmp_path / "train.py").write_text(script)
    assert "loss" in run(2, str(tmp_path / "train.py"), **variables)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_transformer_learns_and_goes_on_from_a_checkpoint(ranks: int, tmp_path: Path) -> None:
    needs("rich", "torch")
    small = ("--width", 32, "--layers", 1, "--heads", 2, "--context", 16, "--check-every", 20)
    small += ("--sample", 5, "--checkpoint", tmp_path / "gpt.pt")
    output = run(ranks, "torch_gpt.py", "--steps", 40, *small)
    losses = dict(re.findall(r"step (\d+): validation loss ([\d.]+)", output))
    assert list(losses) == ["20", "40"], output
    assert float(losses["40"]) < float(losses["20"]) < 4.6  # 4.6 is what knowing nothing costs
    assert "a sample" in output and "def " in output
    assert [path.name for path in tmp_path.iterdir()] == ["gpt.pt"]

    output = run(ranks, "torch_gpt.py", "--resume", "--steps", 60, *small)
    resumed = dict(re.findall(r"step (\d+): validation loss ([\d.]+)", output))
    assert list(resumed) == ["60"], output
    assert float(resumed["60"]) < float(losses["20"])


@NEEDS_MPIRUN
def test_images_in_patches_train_as_whole_ones() -> None:
    needs("torch")
    words = ("--grid", 2, 2, "--size", 64, "--steps", 3)
    output = run(4, "torch_large_images.py", *words, **TORCH[1])
    found = re.search(r"2 x 2 patches: .* weights differ by ([\d.e-]+) at most", output)
    assert found is not None, output
    assert float(found[1]) < 1e-6


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "script, framework",
    [
        pytest.param("torch_synthetic_benchmark.py", TORCH, id="torch"),
        pytest.param("tf_synthetic_benchmark.py", TENSORFLOW, id="tf"),
    ],
)
def test_resnet_is_measured(ranks: int, script: str, framework: Framework) -> None:
    module, variables = framework
    needs(module)
    quick = ("--batch-size", 1, "--image-size", 64, "--num-warmup-batches", 1)
    quick += ("--num-batches-per-iter", 1, "--num-iters", 2)
    output = run(ranks, script, *quick, "--no-cuda", "--use-adasum", **variables)
    assert len(re.findall(r"Iter #\d: [\d.]+ img/sec per CPU", output)) == 2, output
    assert re.search(rf"Total img/sec on {ranks} CPU\(s\): [\d.]+ \+-[\d.]+", output), output


@pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN)
def test_the_timelines_of_all_ranks_can_be_merged(tmp_path: Path) -> None:
    needs("torch")
    flags = ("--timeline-filename", str(tmp_path / "t.json"), "--timeline-all-ranks")
    flags += ("--transport", "mpi")
    quick = ("--batch-size", 1, "--image-size", 64, "--num-warmup-batches", 0)
    quick += ("--num-batches-per-iter", 2, "--num-iters", 1, "--no-cuda", "--bf16-allreduce")
    run(2, "torch_synthetic_benchmark.py", *quick, launcher=flags)
    files = [str(tmp_path / f"t.rank{rank}.json") for rank in range(2)]
    merged = tmp_path / "merged.json"
    assert timeline(["merge", *files, "-o", str(merged)]) == 0
    assert timeline(["check", str(merged)]) == 0
    events = json.loads(merged.read_text())
    names = {event["args"].get("name", "") for event in events if event["ph"] == "M"}
    model = runpy.run_path(str(ROOT / "examples" / "torch_synthetic_benchmark.py"))["ResNet50"]()
    gradients = [name for name, _ in model.named_parameters()]
    assert len(gradients) == 161
    for rank in range(2):
        assert names >= {f"rank {rank}: allreduce.{name}" for name in gradients}


def test_sharded_gpt_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Trained by 2 ranks, sampled by 1."""
    needs("torch", "rich")
    small = ["--layers", 1, "--width", 16, "--context", 16, "--checkpoint", tmp_path / "kept"]
    output = run(2, "torch_fsdp_gpt.py", "--steps", 4, "--sample", 0, *small, **TORCH[1])
    assert "step 4: loss" in output and "ranks 2" in output, output
    words = ["--resume", "--steps", 0, "--sample", 20]
    written = run(1, "torch_fsdp_gpt.py", *words, *small, **TORCH[1])
    assert "def " in written and "step" not in written, written


@pytest.mark.soak
def test_sharded_gpt_equals_one_rank(tmp_path: Path) -> None:
    """Four steps by 4 ranks and four by 2 reach the loss of eight steps by one rank."""
    needs("torch", "rich")
    small = ["--layers", 2, "--width", 32, "--sample", 0, "--print-every", 8]
    kept = ["--checkpoint", tmp_path / "kept"]
    run(4, "torch_fsdp_gpt.py", "--steps", 4, *small, *kept, **TORCH[1])
    # The learning rate follows --steps only after the warm-up.
    output = run(2, "torch_fsdp_gpt.py", "--steps", 8, "--resume", *small, *kept, **TORCH[1])
    alone = ["--checkpoint", tmp_path / "alone"]
    expected = run(1, "torch_fsdp_gpt.py", "--steps", 8, *small, *alone, **TORCH[1])
    losses = [float(re.findall(r"step 8: loss ([\d.]+)", text)[0]) for text in (output, expected)]
    assert abs(losses[0] - losses[1]) < 2e-4, losses


@pytest.mark.parametrize("many", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_sharded_transformer_writes_what_one_rank_does(tmp_path: Path, many: int) -> None:
    """Trained by 2 ranks; the same texts by 1 and by more, which have fewer weights and heads."""
    needs("torch", "rich", "safetensors")
    small = ["--layers", 2, "--width", 32, "--context", 16, "--checkpoint", tmp_path / "kept"]
    output = run(2, "torch_generate_sharded.py", "--steps", 30, *small, **TORCH[1])
    assert "step 30: loss" in output, output
    texts, held = [], []
    for ranks in (1, many):
        output = run(ranks, "torch_generate_sharded.py", *small, **TORCH[1])
        texts.append(re.findall(r"'(?:def |for ).*'", output))
        held += re.findall(rf"ranks {ranks}: (\d+) of \d+ weights .* of (\d) of 4 heads", output)
    assert len(texts[0]) == 2 and texts[0] == texts[1], texts
    assert int(held[1][0]) < int(held[0][0]) and int(held[1][1]) == 4 // many, held


@pytest.mark.soak
def test_tensor_parallel_layers(tmp_path: Path) -> None:
    needs("torch")
    output = run(4, "torch_tensor_parallel.py", **TORCH[1])
    apart = re.findall(r"at most ([\de.+-]+) from the whole network", output)
    assert apart and float(apart[0]) < 1e-5, output


def test_a_recommender_learns_with_its_rows_on_servers() -> None:
    needs("torch", "safetensors")
    servers = ("--ps-servers", "2")
    output = run(2, "torch_ps_embedding.py", "--steps", 300, launcher=servers, **TORCH[1])
    found = re.findall(r"area under the curve: ([\d.]+)", output)
    assert len(found) == 1, output
    assert float(found[0]) > 0.6  # 0.5 is what knowing nothing gives
