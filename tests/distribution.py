"""Spreads the tests over several processes, the workers, where pytest-xdist is installed.

A run of folders, such as the whole suite, gets two workers for each core and two more, for most
tests start processes and wait for them. A run of files gets none, and neither does `-n 0`.

The workers of the whole suite are forked from a process that has imported the frameworks: one that
imports them itself takes ten seconds of a core to collect the tests.

A worker is handed units: a file, so that what its tests share is made once; a test of those that
start processes and share nothing; or all tests that share a cluster. Tests and files are
mixed, so that a core has work while jobs wait.
"""

from __future__ import annotations

import compileall
import fcntl
import itertools
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from tests.forks import forks

TESTS = Path(__file__).parent
WORKERS_PER_CORE, MORE_WORKERS = 2, 2
# What the workers of the whole suite have imported, by the marker of the tests that need it, and
# variables with which that has no threads and prints nothing.
IMPORTED = {
    "torch": ("torch._dynamo",),
    "tf": ("tensorflow", "keras", "matplotlib.pyplot"),
}
QUIETLY = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "TF_CPP_MIN_LOG_LEVEL": "2"}
# Of these files, and of those in these folders, each test is a unit.
SEPARATE = (
    "tests/elastic/",
    "tests/launcher/",
    "tests/parallel/",
)
# Tests whose path begins so are one unit: they share a cluster, or simulated hosts, of which each
# unit has its own.
CLUSTERS = (
    "tests/hosts/slurm/",
    "tests/hosts/test_elastic",
    "tests/hosts/test_parameter_server",
    "tests/hosts/test_own_launcher",
    "tests/hosts/",
    "tests/ray/",
    "tests/spark/",
)
# Files among the separate ones of which all tests look at the same jobs.
TOGETHER = tuple(
    f"tests/parallel/test_{name}.py"
    for name in ("process_group", "tf", "torch_checkpoint", "torch_sharding")
)
# What takes longest comes first, so that no worker is left with it at the end.
LONG = (
    "tests/keras/test_elsewhere.py",
    "tests/test_style.py",
    "tests/parallel/test_process_group.py",
    "tests/parallel/test_torch_checkpoint.py",
    "tests/parallel/test_torch_sharding.py",
    "tests/parallel/test_tf.py",
    "tests/parallel/test_examples.py",
    "tests/parallel/test_wheel.py",
    "tests/launcher/elastic/test_tutorial.py",
    "tests/common/collectives/",
    "tests/ps/test_page.py",
    "tests/ps/test_scenarios.py",
    "tests/parallel/test_benchmarks.py",
    "tests/parallel/test_torch",
    "tests/elastic/test_training.py",
)


def is_worker(config: pytest.Config) -> bool:
    """Return whether this process is one of several that run the tests."""
    return hasattr(config, "workerinput")


def is_whole(config: pytest.Config) -> bool:
    """Return whether all folders of tests are asked for."""
    return TESTS in [Path(config.invocation_params.dir, word).resolve() for word in config.args]


@cache
def may_be_chosen(expression: str, markers: frozenset[str]) -> bool:
    """Return whether `-m` can choose a test that has these markers, and perhaps others."""
    if not expression:
        return True
    others = {*re.findall(r"\w+", expression)} - {"and", "or", "not"} - markers
    subsets = (itertools.combinations(others, length) for length in range(len(others) + 1))
    chosen = Expression.compile(expression).evaluate
    return any(
        chosen(lambda name, **_: name in {*markers, *more})  # noqa: B023 - it is called at once
        for more in itertools.chain.from_iterable(subsets)
    )


@pytest.hookimpl(tryfirst=True)  # xdist reads in the same hook what is set here
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Choose the number of workers, unless the command line does."""
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or is_worker(config):
        return
    chosen = option.numprocesses is not None or option.tx or option.dist != "no"
    chosen = chosen or "PYTEST_XDIST_WORKER" in os.environ  # a test has started this run
    if not (chosen or option.collectonly or option.usepdb) and _are_folders(config):
        option.numprocesses = WORKERS_PER_CORE * len(os.sched_getaffinity(0)) + MORE_WORKERS
    if option.dist == "no" and option.numprocesses:
        option.dist = "loadscope"  # by `Scheduling`
        option.loadscopereorder = False


def _are_folders(config: pytest.Config) -> bool:
    return all(Path(config.invocation_params.dir, word).is_dir() for word in config.args)


@contextmanager
def forked_workers(config: pytest.Config) -> Iterator[None]:
    """Let the workers that are started meanwhile be forked, where they run the whole suite."""
    modules = [
        module
        for marker, modules in IMPORTED.items()
        if may_be_chosen(config.option.markexpr, frozenset({marker}))
        for module in modules
        if find_spec(module.partition(".")[0])
    ]
    if not (modules and is_whole(config) and config.option.numprocesses) or is_worker(config):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forks(*modules, **QUIETLY))
        compile_all(config)  # While the frameworks are imported.
        yield


def compile_all(config: pytest.Config) -> None:
    """Leave compiled files of the package and the tests, which each worker would compile itself.

    They come to the same file at the same time. Of the tests, that takes what is pytest's own; with
    a release that has it otherwise, they begin some seconds later.
    """
    for package in ("hvdlite", "launcher"):
        compileall.compile_dir(TESTS.parent / package, quiet=2)
    with suppress(AttributeError, ImportError, TypeError):
        from _pytest.assertion import rewrite

        state = config.stash[rewrite.assertstate_key]
        for file in (*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")):
            folder = rewrite.get_cache_dir(file)
            compiled = folder / f"{file.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(folder):
                of_source, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, of_source, compiled)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return what hands units to workers, unless the command line chooses another way."""
    if config.option.dist != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        """Goes on after the death of a worker, where that of xdist 3.8 waits for ever.

        There the test that ended a worker is run again, a worker that comes in its place keeps the
        last test of its first unit until it hears of another one, and one that has not yet found
        its tests must not be handed any.
        """

        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

        def remove_node(self, node: Any) -> str | None:
            units = self.assigned_work.pop(node)
            left = [test for tests in units.values() for test, done in tests.items() if not done]
            if not left:
                return None
            units[unit(left[0])][left[0]] = True
            waiting = {name: tests for name, tests in units.items() if not all(tests.values())}
            self.workqueue.update(waiting)
            for other in self.nodes:
                self._reschedule(other)
            return str(left[0])

        def schedule(self) -> None:
            super().schedule()
            for node in self.nodes:
                self._reschedule(node)

        def _reschedule(self, node: Any) -> None:
            if node in self.registered_collections:
                super()._reschedule(node)

    return Scheduling(config, log)


def unit(test: str) -> str:
    """Return the unit of a test: what has its cluster, its file, or itself."""
    file = test.split("::", 1)[0]
    for start in CLUSTERS:
        if file.startswith(start):
            return start
    return test if file.startswith(SEPARATE) and file not in TOGETHER else file


def mix(items: list[pytest.Item]) -> None:
    """Sort tests so that both kinds of units alternate, and long ones come first."""
    tests_of = Counter(unit(item.nodeid) for item in items)
    places: dict[str, float] = {}
    for separate in (True, False):
        kind = [each for each in tests_of if each.startswith(SEPARATE) == separate]
        kind.sort(key=lambda each: (not each.startswith(LONG), -tests_of[each]))
        places.update({each: number / len(kind) for number, each in enumerate(kind)})
    items.sort(key=lambda item: (places[unit(item.nodeid)], unit(item.nodeid)))


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]) -> Path:
    """Return what `make` has made in an empty folder, in the first worker that asks for it."""
    base = factory.getbasetemp()
    if base.name.startswith("popen-"):  # the folder of a worker
        base = base.parent
    folder = base / f"once-{name}"
    with open(base / f"once-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "made"
        if not made.exists():
            with suppress(FileNotFoundError):
                folder.rename(factory.mktemp("failed"))
            folder.mkdir()
            made.write_text(str(make(folder)))
        return Path(made.read_text())
