"""Marks every test by what it needs, from the folder or the module that it is in.

`distribution.py` spreads the tests over workers. The sdist and the wheel of the checkout are built
once for all of them.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tarfile
import threading
from collections.abc import Generator, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import distribution
from tests.distribution import TESTS, once, pytest_cmdline_main, pytest_xdist_make_scheduler
from tests.limits import patient
from tests.wheel import ROOT, build, build_for, copy_of_the_checkout, cross_compiler

__all__ = ["pytest_cmdline_main", "pytest_xdist_make_scheduler"]

# Hundreds of short processes import the checkout: most read what the first of them has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A second thread of each of many processes would only wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Elastic jobs compare the state of all ranks after each reset, whichever test starts them.
os.environ.setdefault("HVDLITE_ELASTIC_CHECK", "1")
# An example may take long where other tests use the cores.
settings.register_profile("hvdlite", deadline=None)
settings.load_profile("hvdlite")
# A shell starts what runs in the background without SIGINT, which jobs would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MPI_FOLDERS = {"parallel", "launcher", "hosts"}
HOSTS_FOLDERS = {"hosts", "slurm"}
# Many combinations of one thing, whole trainings, or what is built: the fast loop does without.
THOROUGH = (
    "checkpoint/test_numpy_checkpoint.py",
    "common/api/test_collectives_matrix.py",
    "common/api/test_reduce.py",
    "common/collectives/",
    "common/devices/nccl/",
    "common/engine/test_random_joins.py",
    "common/engine/test_random_order.py",
    "common/engine/test_short_collectives.py",
    "common/layouts/test_search.py",
    "common/segmentation/test_tuner.py",
    "common/transport/test_tcp_networks.py",
    "elastic/",
    "keras/test_matrix.py",
    "ps/test_backward.py",
    "ps/test_checkpoints.py",
    "ps/test_layout_changes.py",
    "ps/test_loads.py",
    "ps/test_lost_leaders.py",
    "ps/test_records.py",
    "ps/test_scaling.py",
    "ps/test_scenarios.py",
    "ps/test_strangers.py",
    "simulation/",
    "test_distribution.py",
    "test_wheel.py",
)
# So begin the names of tests that take seconds of processor time where others show nearly the same.
HEAVY = (*(TESTS / "heavy.txt").read_text().splitlines(),)
KERAS_BACKEND = os.environ.get("KERAS_BACKEND", "tf")
FRAMEWORKS = {
    "gpu": "gpu",
    "jax": "jax",
    # Who has chosen JAX for Keras wants these tests.
    **({} if KERAS_BACKEND == "jax" else {"keras": KERAS_BACKEND}),
    "ray": "ray",
    "spark": "spark",
    "tf": "tf",
    "torch": "torch",
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read no file of which all tests were left out: some of them import for seconds."""
    if collection_path == TESTS or not distribution.is_whole(config):
        return None
    known = frozenset(markers(collection_path.relative_to(TESTS)))
    return None if distribution.may_be_chosen(config.option.markexpr, known) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the markers `heavy`, `mpi`, `hosts`, `slurm`, `ray`, `spark`, `tf`, `thorough`, `torch`.

    The time limit that a test or its file names, or else the one of all tests, is of a machine
    that is not slow.
    """
    names = {path: path.relative_to(TESTS) for path in {item.path for item in items}}
    markers_of = {path: [*markers(name)] for path, name in names.items()}
    heavy_in = {path: heavy_names(name) for path, name in names.items()}
    for item in items:
        for marker in markers_of[item.path]:
            item.add_marker(marker)
        if item.name.startswith(heavy_in[item.path]):
            item.add_marker("heavy")
        nearest = item.get_closest_marker("timeout")
        seconds = float(nearest.args[0] if nearest else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patient(seconds)), append=False)
    if distribution.is_worker(config):
        distribution.mix(items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    """Start the workers."""
    with distribution.forked_workers(session.config):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what the frameworks and the tests are made of out of later garbage collections.

    It is most of a million objects, which take half a second to look through, and some tests
    collect several times.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """Let TensorFlow look at the arguments of one call at a time: ranks are threads here.

    It has one list for the arguments of a function, which the calls of all threads fill. Where a
    type comes for the first time, it runs Python code before it reads on, and another thread's call
    may have replaced, and freed, what it reads: the process dies by SIGSEGV.
    """
    if "tensorflow" not in sys.modules:
        return
    from tensorflow.python.framework._pywrap_python_api_dispatcher import PythonAPIDispatcher

    dispatch, at_a_time = PythonAPIDispatcher.Dispatch, threading.RLock()

    def dispatch_alone(self: Any, *arguments: Any) -> Any:
        with at_a_time:
            return dispatch(self, *arguments)

    PythonAPIDispatcher.Dispatch = dispatch_alone


def heavy_names(path: Path) -> tuple[str, ...]:
    """Return how the names of the heavy tests in a file begin; its path is as of `markers`."""
    file = f"{path.as_posix()}::"
    return tuple(each.removeprefix(file) for each in HEAVY if each.startswith(file))


def markers(path: Path) -> Iterator[str]:
    """Yield the markers of the tests in a file or a folder; its path is relative to this folder."""
    folders = {*(path if path.suffix != ".py" else path.parent).parts}
    if folders & MPI_FOLDERS:
        yield "mpi"
    yield from sorted(folders & HOSTS_FOLDERS)
    if str(path).startswith(THOROUGH):
        yield "thorough"
    words = folders | set(path.stem.split("_"))
    for framework in sorted({marker for word, marker in FRAMEWORKS.items() if word in words}):
        yield {"tensorflow": "tf"}.get(framework, framework)


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of the checkout."""
    # Not imported, for it refuses where another test has imported Python's own distutils.
    try:
        version = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        version = "0"
    if int(version.partition(".")[0]) < 77:
        pytest.skip("the extra 'test' is not installed")
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")

    def make(folder: Path) -> Path:
        return build("sdist", copy_of_the_checkout(folder / "source"), folder / "dist")

    return once(tmp_path_factory, "sdist", make)


@pytest.fixture(scope="session")
def unpacked_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is in the sdist."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        # Without the argument, Python 3.12 and 3.13 warn; 3.10.11 and 3.11.3 do not know it.
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **safely)
    (source,) = folder.iterdir()
    return source


@pytest.fixture(scope="session")
def wheel(unpacked_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist, so the sdist has what a build needs; compiled where that can be."""
    return once(tmp_path_factory, "wheel", partial(build, "wheel", unpacked_sdist))


@pytest.fixture(scope="session")
def pure_wheel(unpacked_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built where there is no compiler."""

    def make(folder: Path) -> Path:
        return build("wheel", unpacked_sdist, folder, CXX="/nowhere/c++")

    return once(tmp_path_factory, "pure-wheel", make)


@pytest.fixture(scope="session")
def aarch64_wheel(unpacked_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for aarch64."""
    if shutil.which(cross_compiler("aarch64")) is None:
        pytest.skip("there is no compiler for aarch64")
    return once(tmp_path_factory, "aarch64-wheel", partial(build_for, "aarch64", unpacked_sdist))
