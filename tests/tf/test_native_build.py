"""Compiling the operations is never a condition; the cache itself is tested without TensorFlow."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.collectives.native import build
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.tf.native import loader as native
from hvdlite.tf.native.loader import recipe
from tests.compilers import Compiler
from tests.parallel.jobs import run_command
from tests.ranks import run_ranks
from tests.tf.test_native import needs_compiler

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has not looked yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HVDLITE_TF_NATIVE", raising=False)
    monkeypatch.setattr(native, "_state", native._State())
    # The C library does not load a file twice that has the same name.
    monkeypatch.setattr(native, "recipe", lambda: replace(recipe(), depends_on=(str(tmp_path),)))
    return tmp_path / "cache"


def use(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler.path))


@pytest.mark.parametrize("reason", ["no compiler", "not a library"])
def test_without_the_operations_python_runs_collectives(
    reason: str,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if reason == "no compiler":
        monkeypatch.setenv("CXX", "/nowhere/c++")
    else:
        use(Compiler(tmp_path, 'echo whole > "$2"'), monkeypatch)
    why = {
        "no compiler": r"there is no \$CXX \(/nowhere/c\+\+\) here",
        "not a library": r"\.so cannot be loaded",
    }[reason]

    def main(rank: int) -> None:
        total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
        assert total(tf.constant(1.0)).numpy() == 2

    monkeypatch.setattr(logging.getLogger("hvdlite"), "propagate", True)
    with caplog.at_level(logging.INFO, "hvdlite"):  # a warning only from the first of a host
        run_ranks(2, main)
    # By identity: pytest sees a record twice, if an earlier test has set up the log.
    said = {id(each) for each in caplog.records if "of a graph runs in Python" in each.getMessage()}
    assert len(said) == 1, caplog.messages
    monkeypatch.setenv("HVDLITE_TF_NATIVE", "on")
    with pytest.raises(BuildError, match=why):
        run_ranks(1, lambda rank: tf.function(hvd.barrier)())


def test_one_rank_alone_does_not_wait_for_a_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(tmp_path, "exit 1")
    use(compiler, monkeypatch)
    total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    run_ranks(1, lambda rank: total(tf.constant(1.0)))
    assert compiler.calls == 0


def test_off_does_not_even_look(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(tmp_path, "exit 1")
    use(compiler, monkeypatch)
    monkeypatch.setenv("HVDLITE_TF_NATIVE", "off")
    run_ranks(2, lambda rank: tf.function(hvd.allreduce)(tf.constant(1.0)))
    assert compiler.calls == 0


@needs_compiler
def test_the_command_says_what_it_has_made() -> None:
    done = run_command([sys.executable, "-m", "hvdlite.tf.build"], timeout=200)
    assert done.returncode == 0, done.stdout
    assert f"ops-{tf.version.VERSION}-" in done.stdout


def test_the_command_says_why_it_cannot(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.main(recipe(), "") == 1
    assert "there is no $CXX" in capsys.readouterr().err
