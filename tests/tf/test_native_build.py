"""Compiling the operations: once, for everybody, and never a condition."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.collectives.native.build import BuildError
from hvdlite.tf.native import loader as native
from hvdlite.tf.native.recipe import recipe
from tests.parallel.jobs import run_command
from tests.ranks import run_ranks
from tests.tf.test_native import needs_compiler

pytestmark = pytest.mark.timeout(240)


class Compiler:
    """A command that takes the arguments of a compiler, and counts its calls."""

    def __init__(self, directory: Path, body: str, name: str = "compiler") -> None:
        self._calls = directory / f"{name}.calls"
        self.path = directory / name
        self.path.write_text(
            f"""#!/bin/sh
if [ "$1" = --version ]; then echo "{name} 1.0"; exit; fi
echo called >> "{self._calls}"
while [ "$1" != -o ]; do shift; done
{body}
"""
        )
        self.path.chmod(0o700)

    @property
    def calls(self) -> int:
        """How often it was asked to compile."""
        return len(self._calls.read_text().split()) if self._calls.exists() else 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has not looked yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HVDLITE_TF_NATIVE", raising=False)
    monkeypatch.setattr(native, "_state", native._State())
    return tmp_path / "cache"


def use(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler.path))


def files(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.rglob("*") if path.is_file())


def test_one_compiles_for_all(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(tmp_path, 'echo half > "$2"; sleep 0.3; echo whole > "$2"')
    use(compiler, monkeypatch)
    seen: list[str] = []
    assert recipe().compiled() is None
    # To a lock on a file, two threads are as two processes.
    threads = [
        threading.Thread(target=lambda: seen.append(recipe().compile_once().read_text()))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["whole\n"] * 6
    assert compiler.calls == 1
    assert recipe().compiled() == recipe().compile_once()
    assert files(cache) == [".lock", ".so"]
    assert (cache / "hvdlite" / "tf").stat().st_mode & 0o777 == 0o700


def test_a_failure_is_remembered(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Compiler(tmp_path, 'echo half > "$2"; echo "no such header" >&2; exit 1')
    use(broken, monkeypatch)
    with pytest.raises(
        BuildError, match=r"compiler 1\.0\) cannot compile .*see (.*\.failed)"
    ) as raised:
        recipe().compile_once()
    log = Path(str(raised.value).rpartition(" ")[2])
    assert "no such header" in log.read_text()
    assert files(cache) == [".failed", ".lock"]
    with pytest.raises(BuildError, match=r"could not compile .* earlier"):
        recipe().compile_once()
    assert broken.calls == 1
    with pytest.raises(BuildError, match="cannot compile"):
        recipe().compile_once(try_again=True)
    assert broken.calls == 2
    use(Compiler(tmp_path, 'echo whole > "$2"', name="another"), monkeypatch)
    assert recipe().compile_once().read_text() == "whole\n"
    assert files(cache) == [".lock", ".so"]


def test_a_directory_that_others_can_write_to_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Compiler(tmp_path, 'echo whole > "$2"'), monkeypatch)
    directory = cache / "hvdlite" / "tf"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with pytest.raises(BuildError, match=r"others can write to .*XDG_CACHE_HOME"):
        recipe().compile_once()


def test_what_others_have_put_there_is_not_loaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Compiler(tmp_path, 'echo whole > "$2"'), monkeypatch)
    path = recipe().compile_once()
    path.parent.chmod(0o777)
    with pytest.raises(BuildError, match="others can write to"):
        recipe().compile_once()
    with pytest.raises(BuildError, match="others can write to"):
        recipe().compiled()


def test_a_cache_that_cannot_be_written_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Compiler(tmp_path, 'echo whole > "$2"'), monkeypatch)
    cache.write_text("this is no directory")
    with pytest.raises(BuildError, match="set XDG_CACHE_HOME"):
        recipe().compile_once()


@pytest.mark.parametrize("broken", ["lock", "failed"])
def test_a_cache_where_a_file_cannot_be_written_is_named(
    broken: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Compiler(tmp_path, "exit 1"), monkeypatch)
    path = cache / "hvdlite" / recipe().folder / f"{recipe()._file_name()}.{broken}"
    path.mkdir(parents=True)
    for directory in (path.parent, path.parent.parent):
        directory.chmod(0o700)
    with pytest.raises(BuildError, match=r"cannot be used: .*set XDG_CACHE_HOME"):
        recipe().compile_once()


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
    said = {id(each) for each in caplog.records if "graphs call Python" in each.getMessage()}
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


def test_the_command_says_why_it_cannot(tmp_path: Path) -> None:
    done = run_command(
        [sys.executable, "-m", "hvdlite.tf.build"],
        timeout=60,
        CXX="/nowhere/c++",
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert done.returncode == 1
    assert "there is no $CXX" in done.stdout
