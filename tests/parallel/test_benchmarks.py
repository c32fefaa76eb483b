"""The benchmarks run, check what they measure, and write figures for every entry."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections import Counter
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.parallel.hosts import two_hosts
from tests.parallel.jobs import MPIRUN, NO_MPIRUN, ROOT, mpirun, run_command

pytest.importorskip("torch", reason="the extra 'torch' is not installed")
pytestmark = [pytest.mark.scripts, pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN)]
BENCHMARKS = ROOT / "benchmarks"


def run(
    path: Path, script: str, *words: str, limit: float = 100
) -> tuple[str, list[dict[str, Any]]]:
    """The output of a benchmark on two ranks, and the records of its file."""
    short = ("--ranks", "2", "--seconds", "0", "--json", str(path))
    done = run_command([sys.executable, str(BENCHMARKS / script), *short, *words], timeout=limit)
    assert done.returncode == 0, done.stdout
    records: list[dict[str, Any]] = json.loads(path.read_text())["records"]
    for each in records:
        assert 0 < each["seconds"]["low"] <= each["seconds"]["median"] <= each["seconds"]["high"]
    return done.stdout, records


def test_collectives(tmp_path: Path) -> None:
    cases = ("--sizes", "4 B", "4 KiB", "--dtypes", "float32", "bfloat16", "--collectives")
    words = (*cases, "allreduce", "allgather", "reducescatter", "broadcast", "alltoall")
    output, records = run(tmp_path / "c.json", "collectives.py", *words, "--rounds", "1")
    found = Counter(each["entry"] for each in records)
    every = 5 * 2 * 2  # collectives, sizes, dtypes
    assert found == {
        **dict.fromkeys(("hvdlite numpy", "hvdlite torch", "gloo", "copy"), every),
        "MPI": every - 2 * 2,  # it cannot add bfloat16
    }, output
    assert "left out: MPI: allreduce of bfloat16" in output
    assert "\nreducescatter, float32, 2 ranks:\n" in output


def test_libraries_take_turns(tmp_path: Path) -> None:
    """A figure is the median of several jobs, which are launched A B A B."""
    entries = ["MPI", "hvdlite numpy"]
    words = ("--sizes", "4 B", "ResNet-50", "--entries", *entries, "--rounds", "2")
    output, records = run(tmp_path / "c.json", "collectives.py", *words)
    assert re.findall(r"round \d of 2, ([\w ]+):", output) == entries * 2
    sizes = ["4 B", "ResNet-50", "ResNet-50 flat"]
    assert [(each["entry"], each["size"]) for each in records] == [*product(entries, sizes)]
    for each in records:
        least, most = sorted(each["jobs"])
        assert each["seconds"] == {"low": least, "median": (least + most) / 2, "high": most}


@pytest.mark.parametrize(
    ("entry", "others"), [("MPI", "hvdlite|torch"), ("gloo", "hvdlite|mpi4py")]
)
def test_the_job_of_a_library_imports_no_other(entry: str, others: str, tmp_path: Path) -> None:
    words = ["--entries", entry, "--ranks", "2", "--sizes", "4 B", "--seconds", "0"]
    file = tmp_path / "measured.json"
    program = [sys.executable, "-X", "importtime", str(BENCHMARKS / "collectives.py")]
    done = run_command(mpirun(2, *program, *words, "--rank-file", str(file)))
    assert done.returncode == 0, done.stdout
    assert json.loads(file.read_text())[0]["entry"] == entry
    assert re.findall(rf"\| +((?:{others})\b.*)", done.stdout) == []


def test_tables_are_written_into_the_page(tmp_path: Path) -> None:
    page, script = tmp_path / "page.md", str(BENCHMARKS / "results.py")
    page.write_text("a\n<!-- begin allreduce -->\nold\n<!-- end allreduce -->\nb\n")
    words = (script, "--only", "allreduce", "--folder", str(tmp_path), "--page", str(page))
    few = ("--ranks", "2", "--rounds", "2", "--sizes", "4 B", "--entries", "MPI", "copy")
    done = run_command([sys.executable, *words, "--", *few, "--seconds", "0"])
    assert done.returncode == 0, done.stdout
    text = page.read_text()
    assert text.startswith("a\n<!-- begin allreduce -->\n`python benchmarks/collectives.py ")
    assert text.endswith("|\n\n<!-- end allreduce -->\nb\n") and "old" not in text
    assert f"python {platform.python_version()}" in text and "Medians of 2 jobs" in text
    assert re.search(r"\nallreduce, float32, 2 ranks:\n\n\| +\| MPI +\| copy +\|\n", text)

    page.write_text("a page without a place for it\n")
    done = run_command([sys.executable, *words, "--tables-only"])
    assert done.returncode != 0 and "<!-- begin allreduce -->" in done.stdout
    assert page.read_text() == "a page without a place for it\n"


def test_small_models(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the data of the example comes with scikit-learn")
    file = tmp_path / "s.json"
    few = ("--rounds", "1", "--steps", "5", "--epochs", "1", "--json", str(file))
    done = run_command([sys.executable, str(BENCHMARKS / "small_models.py"), *few], timeout=60)
    assert done.returncode == 0, done.stdout
    seconds = [each["seconds"]["median"] for each in json.loads(file.read_text())["records"]]
    assert len(seconds) == 5 and min(seconds) > 0, done.stdout


def test_training(tmp_path: Path) -> None:
    words = ("--networks", "gpt", "--entries", "DDP gloo", "hvdlite", "--rounds", "1")
    output, records = run(tmp_path / "t.json", "training.py", *words)
    assert [each["entry"] for each in records] == ["DDP gloo", "hvdlite"], output


@pytest.mark.soak  # TensorFlow starts in four processes
def test_training_of_tensorflow(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="the extra 'tensorflow' is not installed")
    entries = ["MWMS", "hvdlite tape"]
    words = ("--networks", "digits", "--entries", *entries, "--rounds", "1")
    output, records = run(tmp_path / "t.json", "training_tf.py", *words)
    assert [each["entry"] for each in records] == entries, output
    assert "hvdlite tape / MWMS" in output


@pytest.mark.soak  # JAX compiles in four processes
def test_training_of_jax(tmp_path: Path) -> None:
    pytest.importorskip("optax", reason="the extra 'jax' is not installed")
    entries = ["jax.distributed", "hvdlite"]
    words = ("--networks", "gpt", "--entries", *entries, "--rounds", "1")
    output, records = run(tmp_path / "t.json", "training_jax.py", *words)
    assert [each["entry"] for each in records] == entries, output
    assert "hvdlite / jax.distributed" in output


def test_goals_are_compared_round_by_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    goals = import_module("goals")
    steps = {"floor": 1.0, "DDP gloo": 3.0, "hvdlite": 1.5, "hvdlite views": 2.0}

    def run(part: Any) -> Any:
        for entry, seconds in steps.items():
            yield {"network": "wide", "entry": entry, "jobs": [seconds]}

    monkeypatch.setattr(goals, "run", run)
    script = str(BENCHMARKS / "goals.py")
    words = [script, "--part", "steps", "--minutes", "0", "--json", str(tmp_path / "g.json")]
    monkeypatch.setattr(sys, "argv", words)
    goals.main()
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    found = {(line[0], *line[3:]) for line in cells if len(line) == 7}
    floor = "1.00 s (1.00 to 1.00)"
    assert ("wide, hvdlite", "", "0.50 (0.50 to 0.50)", "0.65", "met") in found
    assert ("wide, hvdlite", floor, "0.25 (0.25 to 0.25)", "0.40", "met") in found
    assert ("wide, hvdlite views", floor, "0.50 (0.50 to 0.50)", "0.40", "missed") in found


def test_hosts(tmp_path: Path) -> None:
    with two_hosts(tmp_path, (1, 1)):  # skips where there can be none
        pass
    path, script = tmp_path / "h.json", str(BENCHMARKS / "hosts.py")
    fast = ("--gbit", "100", "--sizes", "1 MiB", "--seconds", "0", "--idle-seconds", "0.1")
    words = (*fast, "--rounds", "1", "--entries", "hvdlite", "MPI_Allreduce", "gloo")
    done = run_command([sys.executable, script, *words, "--json", str(path)], timeout=200)
    assert done.returncode == 0, done.stdout
    records = json.loads(path.read_text())["records"]
    of_hvdlite = product(["hvdlite"], ["tcp", "mpi"], ["init", "1 MiB", "idle CPU"])
    others = [("MPI_Allreduce", "mpi", "1 MiB"), ("gloo", "tcp", "1 MiB")]
    found = [(each["entry"], each["transport"], each["what"]) for each in records]
    assert found == [*of_hvdlite, *others]
    assert re.search(r"\n\| +\| tcp +\| mpi +\| tcp / mpi \| bound / tcp \|\n", done.stdout)
    (of_gloo,) = [line.split("|") for line in done.stdout.splitlines() if "| gloo" in line]
    assert of_gloo[2].strip() and not of_gloo[3].strip()  # It does not run over MPI.


def test_compression(tmp_path: Path) -> None:
    with two_hosts(tmp_path, (1, 1)):  # skips where there can be none
        pass
    path, script = tmp_path / "c.json", str(BENCHMARKS / "compression.py")
    entries = ["none", "powersgd(4)", "DDP, PowerSGD hook"]
    few = ("--tensors", "9", "--rounds", "1", "--seconds", "0", "--json", str(path))
    done = run_command([sys.executable, script, *few, "--entries", *entries], timeout=200)
    assert done.returncode == 0, done.stdout
    records = json.loads(path.read_text())["records"]
    assert [each["entry"] for each in records] == entries
    assert min(each["seconds"]["low"] for each in records) > 0
    assert "powersgd(4) takes " in done.stdout


def test_training_with_compression(tmp_path: Path) -> None:
    path, script = tmp_path / "c.json", str(BENCHMARKS / "compression.py")
    few = ("--only", "training", "--trainings", "GPT", "--entries", "onebit")
    done = run_command(
        [sys.executable, script, *few, "--steps", "2", "--json", str(path)], timeout=60
    )
    assert done.returncode == 0, done.stdout
    records = json.loads(path.read_text())["records"]
    assert [(each["what"], each["entry"]) for each in records] == [("GPT", "onebit")]
    assert f"| onebit      | {records[0]['loss']:.4f} |" in done.stdout


def test_a_job_on_hosts_that_fails_ends_the_benchmark(tmp_path: Path) -> None:
    """And the number of streams is that of the ranks: they refuse 0."""
    with two_hosts(tmp_path, (1, 1)):  # skips where there can be none
        pass
    words = ("--transports", "tcp", "--streams", "0", "--json", str(tmp_path / "h.json"))
    done = run_command([sys.executable, str(BENCHMARKS / "hosts.py"), *words], timeout=60)
    assert done.returncode == 1 and "HVDLITE_TCP_STREAMS" in done.stdout, done.stdout
    assert not (tmp_path / "h.json").exists()


def test_idle_cpu(tmp_path: Path) -> None:
    with two_hosts(tmp_path, (1, 1)):  # skips where there can be none
        pass
    words = ("--hosts", "--seconds", "0.2", "--ranks-per-host", "1")
    done = run_command([sys.executable, str(BENCHMARKS / "idle_cpu.py"), *words], timeout=60)
    assert done.returncode == 0, done.stdout
    assert re.findall(r"^(tcp|mpi), .+, 1 rank a host:$", done.stdout, re.M) == ["tcp", "mpi"]
    assert len(re.findall(r"^2 ranks, .+: [\d.]+ %  [\d.]+ %$", done.stdout, re.M)) == 4


def test_start(tmp_path: Path) -> None:
    """The start by each launcher stands beside that of a bare mpirun."""
    path, script = tmp_path / "s.json", str(BENCHMARKS / "start.py")
    words = ("--ranks", "2", "--rounds", "1", "--json", str(path))
    done = run_command([sys.executable, script, *words], timeout=60)
    assert done.returncode == 0, done.stdout
    seconds = {
        each["entry"]: each["seconds"]["median"] for each in json.loads(path.read_text())["records"]
    }
    mpirun_alone = seconds["mpirun -np 2, mpi4py"]
    for launcher in ("agents", "mpirun"):
        ratio = seconds[f"hvdlite-run -np 2, {launcher}"] / mpirun_alone
        assert re.search(rf"hvdlite-run -np 2, {launcher} +\| .+ \| {ratio:.2f} +\|", done.stdout)


@pytest.mark.timeout(300)
def test_elastic(tmp_path: Path) -> None:
    """Survivors send nothing, a newcomer receives the state, and resets leave nothing open."""
    script, path = str(BENCHMARKS / "elastic.py"), tmp_path / "e.json"
    few = ("--quick", "--steps", "1", "--turns", "1", "--turn-steps", "1", "--json", str(path))
    as_users_run = {"HVDLITE_ELASTIC_CHECK": "0"}  # To compare weights costs a collective.
    done = run_command([sys.executable, script, *few], timeout=140, **as_users_run)
    assert done.returncode == 0, done.stdout
    parts: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(path.read_text())["records"]:
        assert 0 < each["seconds"]["low"] <= each["seconds"]["median"] <= each["seconds"]["high"]
        parts.setdefault(each["part"], []).append(each)
    assert [each["rank"] for each in parts["kill"]] == [0, 1]
    for each in parts["kill"]:
        assert each["bytes"] == each["collectives"] == 0
        noticed, joined, entered = each["stages"].values()
        assert 0 < noticed < joined <= entered < each["seconds"]["median"]
    assert all(each["bytes"] > 2**20 for each in parts["growth"])  # 1 MiB of weights
    assert [each["commit"] for each in parts["commit"]] == ["copy", "step"]
    assert [each["entry"] for each in parts["steady"]] == ["fixed", "elastic"]
    assert parts["check"][0]["seconds"]["median"] < parts["steady"][0]["seconds"]["median"]
    resets = parts["resets"]
    assert [each["resets"] for each in resets] == list(range(2, 21, 2))
    for held in ("descriptors", "tasks"):  # The engine of the last world may still hold some.
        assert resets[-1][held] < resets[0][held] + 18


def soak_elastic(folder: Path, *words: str) -> dict[str, Any]:
    """Return what one part of the soak of elastic jobs has found."""
    script, path = str(BENCHMARKS / "soak_elastic.py"), folder / "s.json"
    done = run_command([sys.executable, script, *words, "--json", str(path)], timeout=180)
    assert done.returncode == 0, done.stdout
    (found,) = json.loads(path.read_text())["records"]
    return dict(found)


@pytest.mark.timeout(200)
def test_soak_elastic(tmp_path: Path) -> None:
    found = soak_elastic(tmp_path, "--parts", "numbers", "--kills", "4")
    assert found["kills"] >= 4 and found["worlds"] >= 2 and found["digests"] > 6


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_soak_elastic_of_a_network(tmp_path: Path) -> None:
    found = soak_elastic(tmp_path, "--parts", "gpt", "--seconds", "1", "--every", "1")
    assert (found["kills"], found["worlds"], [*found["sizes"]]) == (1, 3, ["1", "2"])


@pytest.mark.parametrize("wrong", ["", "weights", "a step of one rank", "a rank too few"])
def test_a_soak_finds_what_is_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds of 2 ranks from step 0 on, of 1 from step 3 on, and of 2 from step 5 to 7."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    soak, worker = import_module("soak_elastic"), import_module("elastic_soak_worker")
    digests = worker.replay([2, 2, 2, 1, 1, 2, 2], {0, 3, 5, 7})
    worlds = [(1, 0, 2, "began"), (2, 3, 1, "began"), (3, 5, 2, "began"), (3, 7, 2, "done")]
    notes = [
        {"what": what, "epoch": epoch, "step": step, "size": size, "digest": digests[step]}
        for epoch, step, size, what in worlds for _ in range(size)
    ]  # fmt: skip
    # World 1 came to step 4 on one rank, which then died: no other rank has seen these weights.
    lost = {"what": "began", "epoch": 1.5, "step": 4, "size": 1, "digest": "never compared"}
    notes.insert(2, lost)
    if wrong == "weights":
        notes[3]["digest"] = digests[0]
    elif wrong == "a step of one rank":
        notes[4]["step"] = 6
    elif wrong == "a rank too few":
        notes.pop()
    if wrong:
        with pytest.raises(soak.JobError):
            soak.compare(notes, 2, worker.replay)
    else:
        found = soak.compare(notes, 2, worker.replay)
        assert (found["worlds"], found["steps"], found["digests"]) == (4, 7, 7)


@pytest.mark.timeout(200)
def test_segmentation(tmp_path: Path) -> None:
    """Every way of cutting gives as many reductions as it should; two hosts, not slowed down."""
    pytest.importorskip("sklearn", reason="the extra 'examples' is not installed")
    with two_hosts(tmp_path, (1, 1)):  # skips where there can be none
        pass
    words = ("--networks", "digits", "--rounds", "2", "--gbit", "100", "--delay-ms", "0")
    path, script = tmp_path / "g.json", str(BENCHMARKS / "segmentation.py")
    ways = ("--ways", "one segment", "96.54 / 3.46 %", "16 MiB / 50")
    done = run_command([sys.executable, script, *words, *ways, "--json", str(path)], timeout=180)
    assert done.returncode == 0, done.stdout
    records = json.loads(path.read_text())["records"]
    assert [each["reductions"] for each in records] == [1, 2, 1], done.stdout
    for each in records:
        assert 0 < each["tail_seconds"]["median"] < each["seconds"]["median"]


def test_simulate_coordinator(tmp_path: Path) -> None:
    words = ("--ranks", "8", "4096", "--tensors", "50", "--flat-most", "8")
    output, records = run(tmp_path / "s.json", "simulate_coordinator.py", *words)
    assert [(each["entry"], each["ranks"], each["depth"]) for each in records] == [
        ("tree", 8, 1), ("flat", 8, 1), ("tree", 4096, 3), ("flat", 4096, 1)
    ], output  # fmt: skip
    tree, flat = records[2:]
    assert tree["messages_in"] < flat["messages_in"] / 10 and flat["estimated"]
    assert tree["auto_seconds"] == tree["trees_seconds"] < tree["ring_seconds"] / 10


def test_between_hosts(tmp_path: Path) -> None:
    """Three simulated hosts measure the model and all algorithms, and nothing of them is left."""
    with two_hosts(tmp_path, (1, 1)):  # skips where there can be none
        pass
    if not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("there are no TUN devices")
    words = ("--hosts", "3", "--sizes", "512", "--calls", "1", "--delay-ms", "1", "--mbit", "0",
             "--tensors", "3", "--tensor-sizes", "1024")  # fmt: skip
    path, script = tmp_path / "b.json", str(BENCHMARKS / "between_hosts.py")
    done = run_command([sys.executable, script, *words, "--json", str(path)], timeout=60)
    assert done.returncode == 0, done.stdout
    every = json.loads(path.read_text())["records"]
    steps = [each for each in every if each["kind"] == "a step of tensors"]
    assert {(each["tensors"], each["bytes"]) for each in steps} == {(3, 1024)}
    assert all(0.5e-3 < each["seconds"] < 30 for each in every), done.stdout
    assert all(1e-3 < each["model"] < 1 for each in every), done.stdout
    records = [each for each in every if each["kind"] == "one allreduce"]
    rounds = {"ring": 4, "trees": 2, "halving": 4, "doubling": 2}
    assert [each["algorithm"] for each in records] == [*rounds]
    for each in records:  # Each round takes the delay; of 3 by doubling, no rank waits for all.
        least = rounds[each["algorithm"]] * 1e-3
        assert least < each["seconds"] < 30, done.stdout
        assert each["figures"]["message"] > 1e-3
    namespaces = run_command(["ip", "netns"]).stdout
    makers = re.findall(r"^hvdlite(\d+)n\d+", namespaces, re.MULTILINE)
    assert all(Path("/proc", maker).exists() for maker in makers)


@pytest.mark.soak
def test_process_group(tmp_path: Path) -> None:
    output, records = run(tmp_path / "p.json", "process_group.py", "--rounds", "1")
    cases = {each["case"] for each in records}
    assert {"all_reduce 64 MiB", "send and recv 16 B", "FSDP2 step"} <= cases
    assert Counter(each["entry"] for each in records) == {
        "hvdlite": len(cases),
        "gloo": len(cases) - 1,  # It has no `hvd.allreduce_`.
    }
    assert "hvdlite / gloo" in output


@pytest.mark.parametrize(
    "entries", [["hvdlite"], pytest.param(["hvdlite", "DDP"], marks=pytest.mark.soak)]
)
def test_gpu_on_the_cpu(entries: list[str], tmp_path: Path) -> None:
    words = ("--device", "cpu", "--quick", "--cases", "161", "flat", "--entries", *entries)
    output, records = run(tmp_path / "g.json", "gpu.py", *words)
    found = [(each["entry"], each["case"]) for each in records]
    assert found == [*product(entries, ("161 gradients", "flat 1.0 MiB"))], output
    assert "hvdlite / DDP" in output


def test_gpu_says_that_there_is_none() -> None:
    script = str(BENCHMARKS / "gpu.py")
    done = run_command([sys.executable, script], timeout=60, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stdout
    assert "sees no GPU; --device cpu makes the same calls over gloo" in done.stdout


def test_ranks_share_a_gpu_by_a_new_nccl_only(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu = import_module("gpu")
    monkeypatch.delenv(gpu.SHARING, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    loaded = SimpleNamespace(version=22907, version_text="2.29.7")
    monkeypatch.setattr(gpu, "Nccl", lambda: loaded)
    text = gpu.obstacle("cuda", 2)
    assert "2 ranks have to share 1 GPUs" in text and "NCCL 2.29.7 does not let them" in text
    assert "LD_PRELOAD" in text
    assert gpu.obstacle("cuda", 1) == ""
    assert gpu.SHARING not in os.environ
    loaded.version = 23003
    monkeypatch.setenv(gpu.SHARING, "")  # It is as before, afterwards.
    assert gpu.obstacle("cuda", 2) == ""
    assert os.environ[gpu.SHARING] == "1"
