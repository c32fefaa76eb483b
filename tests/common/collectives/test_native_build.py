"""The compile cache: compiled once, for everybody, by nobody else, and never in pieces."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import pwd
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdlite.common.collectives.native import library as native_library
from hvdlite.common.collectives.native.build import Recipe
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.common.collectives.native.compiler import find_compiler
from tests.compilers import Compiler, small_recipe

pytestmark = pytest.mark.timeout(240)
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
WHOLE = 'echo whole > "$2"'
ABOUT_THE_SOURCE = "answer.cc:2:14: fatal error: no/such.h: No such file or directory"
ACCIDENTS = (
    "g++: fatal error: Killed signal terminated program cc1plus",
    "answer.cc:3:1: fatal error: error writing to /tmp/cc1.s: No space left on device",
    "cc1plus: out of memory allocating 65536 bytes after a total of 1 bytes",
    "virtual memory exhausted: Cannot allocate memory",
)
HOUR_SECONDS = 3600


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return small_recipe(tmp_path)


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Compiler]:
    """Make a compiler of this body the one that is used."""

    def use_it(body: str, name: str = "compiler") -> Compiler:
        compiler = Compiler(tmp_path, body, name)
        monkeypatch.setenv("CXX", str(compiler.path))
        return compiler

    return use_it


def body_of(recipe: Recipe) -> str:
    """What the compiler has written, without the digest."""
    return recipe.compile_once().read_bytes()[:-32].decode()


def answer(path: str) -> int:
    return int(ctypes.CDLL(path).answer())


def forget() -> None:
    """Let this process look for the compiled allreduce as if it never had."""
    native_library._load.cache_clear()
    native_library._say_that_python_runs.cache_clear()


def suffixes(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.rglob("*") if path.is_file())


def failing(message: str) -> str:
    return f'echo half > "$2"; echo "{message}" >&2; exit 1'


# -- once


def test_one_compiles_for_all(cache: Path, recipe: Recipe, use: Callable[..., Compiler]) -> None:
    compiler = use('echo half > "$2"; sleep 0.3; echo whole > "$2"')
    seen: list[str] = []
    assert recipe.load(answer, may_compile=False) is None
    # To a lock on a file, two threads are as two processes.
    threads = [threading.Thread(target=lambda: seen.append(body_of(recipe))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["whole\n"] * 6
    assert compiler.calls == 1
    assert suffixes(cache) == [".lock", ".so"]
    assert (cache / "hvdlite" / "small").stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_what_is_compiled_is_loaded(cache: Path, recipe: Recipe) -> None:
    assert recipe.load(answer) == 42
    assert recipe.load(answer, may_compile=False) == 42


def test_a_source_that_is_not_installed_is_named(cache: Path, recipe: Recipe) -> None:
    recipe.source.unlink()
    with pytest.raises(BuildError, match=r"not complete: .*answer\.cc.*install it again"):
        recipe.load(answer)


# -- failures


def test_a_failure_about_the_source_is_remembered_for_a_day(
    cache: Path, recipe: Recipe, use: Callable[..., Compiler]
) -> None:
    broken = use(failing(ABOUT_THE_SOURCE))
    with pytest.raises(BuildError, match=r"1\.0\) cannot compile .*No such file.*see ") as raised:
        recipe.compile_once()
    record = Path(str(raised.value).rpartition(" ")[2])
    assert ABOUT_THE_SOURCE in record.read_text()
    assert suffixes(cache) == [".failed", ".lock"]

    written = record.stat().st_mtime
    os.utime(record, (written, written - 23 * HOUR_SECONDS))
    with pytest.raises(BuildError, match=r"could not compile .* earlier: .*No such file"):
        recipe.compile_once()
    assert broken.calls == 1
    with pytest.raises(BuildError, match="cannot compile"):
        recipe.compile_once(try_again=True)
    assert broken.calls == 2
    os.utime(record, (written, written - 25 * HOUR_SECONDS))
    with pytest.raises(BuildError, match="cannot compile"):
        recipe.compile_once()
    assert broken.calls == 3
    use(WHOLE, name="another")
    assert body_of(recipe) == "whole\n"
    assert suffixes(cache) == [".lock", ".so"]


@pytest.mark.parametrize("message", ACCIDENTS, ids=["killed", "disk full", "memory", "no memory"])
def test_an_accident_is_forgotten_after_a_minute(
    cache: Path, recipe: Recipe, use: Callable[..., Compiler], message: str
) -> None:
    use(failing(message))
    with pytest.raises(BuildError, match="cannot compile") as raised:
        recipe.compile_once()
    assert message in str(raised.value)
    compiler = use(WHOLE)
    with pytest.raises(BuildError, match="tried again 60 seconds after"):
        recipe.compile_once()  # the other ranks of the same job
    assert compiler.calls == 1
    (record,) = cache.rglob("*.failed")
    os.utime(record, (0, record.stat().st_mtime - 61))
    assert body_of(recipe) == "whole\n"


def test_a_full_folder_for_temporary_files_is_such_an_accident(
    cache: Path, recipe: Recipe, use: Callable[..., Compiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(WHOLE)

    def mkdtemp(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkdtemp", mkdtemp)
        with pytest.raises(BuildError, match="No space left"):
            recipe.compile_once()
    (record,) = cache.rglob("*.failed")
    os.utime(record, (0, record.stat().st_mtime - 61))
    assert body_of(recipe) == "whole\n"


# -- torn files


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "cut off", "one byte short", "one bit"])
def test_a_damaged_library_is_built_again(
    cache: Path, recipe: Recipe, damage: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = recipe.compile_once()
    whole = path.read_bytes()
    damaged = {
        "empty": b"",
        "cut off": whole[: len(whole) // 3],
        "one byte short": whole[:-1],
        "one bit": whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
    }[damage]
    path.write_bytes(damaged)
    monkeypatch.setattr(logging.getLogger("hvdlite"), "propagate", True)
    assert recipe.load(answer, may_compile=False) is None
    assert f"{path} is damaged" in caplog.text
    assert recipe.load(answer) == 42
    assert path.read_bytes()[:4] == b"\x7fELF"


def test_a_library_is_on_the_disk_before_it_has_its_name(
    cache: Path, recipe: Recipe, use: Callable[..., Compiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(WHOLE)
    steps: list[tuple[str, object]] = []
    synchronise, rename = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        steps.append(("fsync", os.fstat(descriptor).st_ino))
        synchronise(descriptor)

    def replace(source: str, target: str, **folders: int) -> None:
        steps.append(("replace", target))
        rename(source, target, **folders)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.replace", replace)
    path = recipe.compile_once()
    library, folder = path.stat().st_ino, path.parent.stat().st_ino
    assert steps == [("fsync", library), ("replace", path.name), ("fsync", folder)]


# -- other users


def test_a_folder_that_others_can_write_to_is_refused(
    cache: Path, recipe: Recipe, use: Callable[..., Compiler]
) -> None:
    use(WHOLE)
    directory = cache / "hvdlite" / "small"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with pytest.raises(BuildError, match=r"others can write to .*XDG_CACHE_HOME"):
        recipe.compile_once()


def test_what_others_have_put_there_is_not_loaded(
    cache: Path, recipe: Recipe, use: Callable[..., Compiler]
) -> None:
    use(WHOLE)
    recipe.compile_once().parent.chmod(0o777)
    for may_compile in (False, True):
        with pytest.raises(BuildError, match="others can write to"):
            recipe.load(answer, may_compile=may_compile)


@needs_compiler
@pytest.mark.parametrize("compiled", [True, False], ids=["found", "compiled now"])
def test_a_folder_that_is_swapped_after_its_check_is_not_loaded_from(
    cache: Path, recipe: Recipe, tmp_path: Path, compiled: bool
) -> None:
    """Another user who owns a parent can swap: what was checked must be what is used."""
    folder = cache / "hvdlite"
    own = tmp_path / "own"
    (tmp_path / "theirs").mkdir()
    theirs = small_recipe(tmp_path / "theirs", answer=666).compile_once()
    bait = folder / "small" / recipe.file_name()
    shutil.copy(theirs, tmp_path / "bait")
    if compiled:
        recipe.compile_once()

    def swap_and_load(path: str) -> int:
        folder.rename(own)
        bait.parent.mkdir(parents=True)
        shutil.copy(tmp_path / "bait", bait)
        return answer(path)

    assert recipe.load(swap_and_load) == 42


def test_a_link_in_place_of_the_library_is_not_followed(
    cache: Path, recipe: Recipe, use: Callable[..., Compiler], tmp_path: Path
) -> None:
    use(WHOLE)
    path = recipe.compile_once()
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(BuildError, match="symbolic link"):
        recipe.load(answer)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_library_of_another_user_is_refused(
    cache: Path, recipe: Recipe, use: Callable[..., Compiler]
) -> None:
    use(WHOLE)
    os.chown(recipe.compile_once(), 65534, -1)
    with pytest.raises(BuildError, match="not a plain file of your own: remove it"):
        recipe.load(answer)


# -- a cache of no use


@pytest.mark.parametrize("home", [None, "~", "relative/home"])
def test_without_a_home_directory_there_is_no_cache(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    def nobody(number: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(BuildError, match="no home directory; set HOME, or XDG_CACHE_HOME"):
        recipe.load(answer)
    assert list((tmp_path / "work").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(
    cache: Path, recipe: Recipe, use: Callable[..., Compiler]
) -> None:
    use(WHOLE)
    cache.write_text("this is no directory")
    with pytest.raises(BuildError, match="set XDG_CACHE_HOME"):
        recipe.compile_once()


@pytest.mark.parametrize("broken", ["lock", "failed"])
def test_a_file_that_cannot_be_written_is_named(
    cache: Path, recipe: Recipe, use: Callable[..., Compiler], broken: str
) -> None:
    use("exit 1")
    path = cache / "hvdlite" / "small" / f"{recipe.file_name()}.{broken}"
    path.mkdir(parents=True)
    path.parent.chmod(0o700)
    with pytest.raises(BuildError, match=rf"{path.name}.*|{path.parent}.*set XDG_CACHE_HOME"):
        recipe.compile_once()


# -- what is said of it


@pytest.mark.parametrize(
    "there_is_one, first_of_host, level",
    [(True, True, "WARNING"), (True, False, "INFO"), (False, True, "INFO")],
    ids=["it fails", "on another rank", "no compiler"],
)
def test_a_compiler_that_fails_is_a_warning_and_none_is_none(
    there_is_one: bool, first_of_host: bool, level: str, cache: Path,
    use: Callable[..., Compiler], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if there_is_one:
        use(failing(ABOUT_THE_SOURCE))
    else:
        monkeypatch.setenv("CXX", "/nowhere/c++")
    forget()
    monkeypatch.setattr(logging.getLogger("hvdlite"), "propagate", True)
    try:
        with caplog.at_level(logging.INFO, "hvdlite"):
            for _ in range(2):  # init, shutdown and init again
                assert native_library.library("auto", first_of_host=first_of_host) is None
    finally:
        forget()
    said = {id(each): each for each in caplog.records if "run in Python" in each.getMessage()}
    assert [each.levelname for each in said.values()] == [level]
    (record,) = said.values()
    assert ("No such file" if there_is_one else "there is no $CXX") in record.getMessage()
