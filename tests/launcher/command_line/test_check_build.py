"""--check-build: what it lists is there, and what it says of compiled code has been tried."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib import import_module
from importlib.metadata import EntryPoint, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvdlite.common.collectives.native import library as native_library
from hvdlite.common.collectives.native.compiler import find_compiler
from hvdlite.launcher import check_build
from hvdlite.tools import trials
from tests.compilers import Compiler, quick_compiler
from tests.launcher.jobs import MARK, executable, launch, processes
from tests.parallel.jobs import clean_environment

pytestmark = pytest.mark.timeout(200)
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
NATIVE = "collectives by shared memory"
PURE = "this installation ships none"
FRAMEWORKS = {"NumPy": "numpy", "PyTorch": "torch", "TensorFlow": "tensorflow", "Keras": "keras"}


def lines(text: str) -> dict[str, bool]:
    """The lines with a mark, and whether they have a cross."""
    return {line[8:]: line[5] == "X" for line in text.splitlines() if line.startswith("    [")}


def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> tuple[str, bool]:
    """What it says of the compiled allreduce, with an empty cache in `folder`."""
    monkeypatch.setattr(check_build, "COMPILED_PATHS", check_build.COMPILED_PATHS[:1])
    monkeypatch.setattr(check_build, "DEVICE_PATHS", ())
    environ = {**clean_environment(), "XDG_CACHE_HOME": str(folder / "cache"), **variables}
    ((text, works),) = (
        item for item in lines(check_build.report(environ)).items() if item[0].startswith(NATIVE)
    )
    return text, works


def test_every_framework_is_listed_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_build, "COMPILED_PATHS", ())
    monkeypatch.setattr(check_build, "DEVICE_PATHS", ())
    listed = lines(check_build.report(os.environ))
    for name, package in FRAMEWORKS.items():
        if find_spec(package) is None:
            assert listed[name] is False
        else:
            distribution, *_ = packages_distributions()[package]
            wanted = rf"{name} {re.escape(version(distribution))}($| \()"
            assert any(re.match(wanted, text) for text in listed), listed


def test_without_mpi_it_says_what_works_and_what_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_build, "COMPILED_PATHS", ())
    monkeypatch.setattr(check_build, "DEVICE_PATHS", ())
    monkeypatch.setattr(check_build, "find_all", lambda environ: iter(()))
    listed = lines(check_build.report({"PATH": str(tmp_path)}))
    works = {text for text, is_there in listed.items() if is_there}
    assert {"agents on this host", "TCP", "shm", "ring"} <= works
    assert not [text for text in works if "mpi" in text.lower()]
    assert listed["agents on other hosts by ssh"] is listed["agents by srun"] is False
    executable(tmp_path / "ssh", "")
    listed = lines(check_build.report({"PATH": str(tmp_path)}))
    assert listed[f"agents on other hosts by ssh ({tmp_path}/ssh)"]


def test_each_path_has_its_trial() -> None:
    paths = (*check_build.COMPILED_PATHS, *check_build.DEVICE_PATHS)
    assert {path.trial for path in paths} == {f"{trials.__name__} {name}" for name in trials.TRIALS}


@needs_compiler
def test_compiled_code_is_compiled_and_tried(tmp_path: Path) -> None:
    words = {f"{NATIVE}: compiled on this machine, as {PURE}": True}
    recipes = [native_library.recipe()]
    has_tensorflow = find_spec("tensorflow") is not None
    if has_tensorflow:
        recipes.append(import_module("hvdlite.tf.native.loader").recipe())
        text = "TensorFlow operations: compiled on this machine, for TensorFlow "
        words[text + import_module("tensorflow").__version__] = True
    if find_spec("jax") is not None:
        recipes.append(import_module("hvdlite.jax.native.library").recipe())
    compiler, cache = quick_compiler(tmp_path, *recipes), tmp_path / "cache"
    done = launch("--check-build", timeout=150, CXX=str(compiler.path), XDG_CACHE_HOME=str(cache))
    assert compiler.calls == len(recipes)
    assert done.returncode == 0, done.stderr
    found = lines(done.stdout)
    assert words.items() <= found.items(), done.stdout
    assert any(text.startswith("TensorFlow: TensorFlow ") for text in found) == has_tensorflow
    libraries = {path.parent.name for path in cache.rglob("*.so")}
    assert libraries == {recipe.folder for recipe in recipes}


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = compiled(tmp_path, monkeypatch, CXX="/nowhere/c++")
    assert said == (f"{NATIVE}: {PURE}, and there is no $CXX (/nowhere/c++) here", False)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Compiler(tmp_path, 'echo "shm.cc:1:1: error: no such thing" >&2; exit 1')
    text, works = compiled(tmp_path, monkeypatch, CXX=str(broken.path))
    assert not works
    assert "shm.cc:1:1: error: no such thing; see " in text


@needs_compiler
@pytest.mark.parametrize(
    "body, reason",
    [("return 0;", "a wrong sum"), ("__builtin_trap();", "ended by SIG(ILL|TRAP|ABRT)")],
    ids=["wrong", "crash"],
)
def test_code_that_compiles_and_does_not_work_is_found_out(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "wrong.cc"
    source.write_text(
        f'extern "C" {{ long hvdlite_run(void*) {{ {body} }} void hvdlite_reduce() {{}} }}'
    )
    real = shutil.which((find_compiler() or [""])[0])
    wrong = Compiler(tmp_path, f'{real} -shared -fPIC {source} -o "$2"')
    text, works = compiled(tmp_path, monkeypatch, CXX=str(wrong.path))
    assert not works
    assert re.search(reason, text), text


def test_what_is_switched_off_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = compiled(tmp_path, monkeypatch, HVDLITE_NATIVE="off")
    assert said == (f"{NATIVE}: HVDLITE_NATIVE=off", False)
    assert not (tmp_path / "cache").exists()


def test_a_trial_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_build, "TRIAL_SECONDS", 0.5)
    python = executable(tmp_path / "python", "sleep 60\n")  # Its child, as the compiler is.
    monkeypatch.setattr(sys, "executable", str(python))
    text, works = compiled(tmp_path, monkeypatch, **{MARK: str(tmp_path)})
    assert not works
    assert "has not ended within" in text
    assert processes(str(tmp_path)) == {}


def test_the_own_binding_to_nccl_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [path for path in check_build.DEVICE_PATHS if path.name == "own binding"]
    monkeypatch.setattr(check_build, "DEVICE_PATHS", paths)
    monkeypatch.setattr(check_build, "COMPILED_PATHS", ())
    text = check_build.report({**os.environ, "HVDLITE_NCCL_LIBRARY": "/none/libnccl.so.2"})
    assert "[ ] own binding: HVDLITE_NCCL_LIBRARY=/none/libnccl.so.2: /none/libnccl.so.2" in text


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        ("import sys; print('noise'); print('NCCL for 2 of cuda')", "[X] PyTorch: NCCL for 2 of"),
        ("import sys; print('torch sees no accelerator'); sys.exit(1)", "[ ] PyTorch: torch sees"),
    ],
)
def test_the_libraries_of_accelerators(
    trial: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "trial_of_devices.py").write_text(trial)
    path = check_build.DEVICE_PATHS[0]._replace(trial="trial_of_devices", package="numpy")
    monkeypatch.setattr(check_build, "DEVICE_PATHS", (path,))
    monkeypatch.setattr(check_build, "COMPILED_PATHS", ())
    point = EntryPoint("mlu", "hvdlite_mlu:library", check_build.DEVICE_PLUG_INS)
    monkeypatch.setattr(check_build, "entry_points", lambda group: [point])
    text = check_build.report({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert expected in text
    assert "[X] plug-in mlu (hvdlite_mlu:library)" in text
    without = check_build.report({**os.environ, "HVDLITE_DEVICES": "off"})
    assert "[ ] PyTorch: HVDLITE_DEVICES=off" in without
