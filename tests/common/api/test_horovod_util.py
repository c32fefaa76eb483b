"""The helpers of horovod.common.util that mean something here."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.common.api import horovod_util as util
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.runtime import basics


def test_env_sets_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_TEST_OLD", "old")
    monkeypatch.setenv("HVD_TEST_KEPT", "kept")
    monkeypatch.delenv("HVD_TEST_NEW", raising=False)
    monkeypatch.delenv("HVD_TEST_GONE", raising=False)
    before = dict(os.environ)
    with (
        pytest.raises(KeyError),
        util.env(HVD_TEST_OLD="1", HVD_TEST_NEW="2", HVD_TEST_GONE="3", HVD_TEST_KEPT=None),
    ):
        assert os.environ["HVD_TEST_OLD"] == "1"
        assert os.environ["HVD_TEST_NEW"] == "2"
        assert os.environ["HVD_TEST_KEPT"] == "kept"
        del os.environ["HVD_TEST_GONE"]
        raise KeyError("also after an error")
    assert dict(os.environ) == before


@given(st.lists(st.integers()), st.integers(1, 12))
def test_split_list(values: list[int], parts: int) -> None:
    chunks = util.split_list(values, parts)
    assert len(chunks) == parts
    assert [value for chunk in chunks for value in chunk] == values
    lengths = [len(chunk) for chunk in chunks]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True), "the first ones are the longer ones"


@pytest.mark.parametrize("parts", [0, -1])
def test_split_list_into_nothing(parts: int) -> None:
    with pytest.raises(ValueError, match=f"into {parts} parts"):
        util.split_list([1, 2], parts)


def test_powers_of_2() -> None:
    powers = [number for number in range(-4, 65) if util.num_rank_is_power_2(number)]
    assert powers == [1, 2, 4, 8, 16, 32, 64]


def test_iterables() -> None:
    class Sequence:
        def __getitem__(self, index: int) -> int:
            raise IndexError

    for value in ([], "", {}, range(3), iter(()), Sequence()):
        assert util.is_iterable(value)
    for value in (None, 3, 3.5, object(), list):
        assert not util.is_iterable(value)


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ("2.6.0", "2.6.0", True),
        ("2.10.0", "2.9.1", True),
        ("2.5.9", "2.6.0", False),
        ("3", "2.6.0", True),
        ("2.6", "2.6.0", True),
        ("2.6", "2.6.1", False),
        ("2.6.0.1", "2.6.0", True),
        ("0.0", "0.0.0", True),
        ("v2.6.0", "2.6.0", True),
        ("2.6.0+cpu", "2.6.0", True),
        ("2.6.0.post1", "2.6.0", True),
        ("2.6.0rc1", "2.6.0", False),
        ("2.6.0-rc1", "2.6.0", False),
        ("2.6.0a0+git1234", "2.6.0", False),
        ("2.6.0.dev20250101", "2.6.0", False),
        ("2.6.0B2", "2.6.0", False),
        ("2.6.1rc1", "2.6.0", True),
        ("10.0.0", "9.10.10", True),
    ],
)
def test_versions(version: str, target: str, expected: bool) -> None:
    assert util.is_version_greater_equal_than(version, target) is expected


@pytest.mark.parametrize(
    ("version", "target", "message"),
    [
        ("2.6.0", "2.6", "must be major.minor.patch, not '2.6'"),
        ("2.6.0", "2.6.0.0", "must be major.minor.patch"),
        ("2.6.0", "2.6.x", "must be major.minor.patch"),
        ("2.6.0", 2, "as strings, not '2.6.0' and 2"),
        (None, "2.6.0", "as strings"),
        ("unknown", "2.6.0", "'unknown' is not a version"),
    ],
)
def test_versions_that_are_none(version: Any, target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        util.is_version_greater_equal_than(version, target)


def test_cache_remembers_by_all_arguments() -> None:
    calls = []

    @util._cache
    def add(a: int, b: int = 0) -> int:
        calls.append((a, b))
        return a + b

    assert [add(1), add(1), add(1, b=2), add(1, b=2), add(2, b=1)] == [1, 1, 3, 3, 3]
    assert calls == [(1, 0), (1, 2), (2, 1)]


def test_average_or_op() -> None:
    resolve = util.get_average_backwards_compatibility_fun(
        SimpleNamespace(Average="their average", Sum="their sum")
    )
    assert resolve(None, None) == "their average"
    assert resolve("their max", None) == "their max"
    assert resolve(ReduceOp.AVERAGE, None) is ReduceOp.AVERAGE, "also where it counts as false"
    for average, expected in ((True, "their average"), (False, "their sum")):
        with pytest.warns(DeprecationWarning, match="average= is deprecated"):
            assert resolve(None, average) == expected
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        resolve("their max", False)


@pytest.mark.parametrize(
    "name", ["mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built"]
)
def test_what_it_is_built_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = getattr(util, name)()
    assert answer == getattr(basics, name)()
    assert capsys.readouterr().out == ""
    assert getattr(util, name)(verbose=True) == answer
    assert capsys.readouterr().out.endswith(f": {'yes' if answer else 'no'}\n")


def test_without_mpi_a_script_for_horovod_finds_gloo() -> None:
    """Horovod has one of them at least, and one of them is in use once it is initialised."""
    adapter = pytest.importorskip("hvdlite.numpy")
    assert adapter.gloo_built() is util.gloo_built() is True
    assert adapter.gloo_enabled() is False, "before init"
    adapter.init()
    try:
        assert (adapter.mpi_enabled(), adapter.gloo_enabled()) == (False, True)
    finally:
        adapter.shutdown()
    assert not (adapter.ccl_built() or adapter.ddl_built() or adapter.nccl_built())


# -- frameworks, with made-up ones: what is installed here does not matter


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Framework `theirs` is there, `absent` is not; hvdlite has a module for both."""
    import hvdlite

    ours = tmp_path / "ours"
    ours.mkdir()
    (tmp_path / "theirs.py").write_text("")
    for name in ("theirs", "absent"):
        (ours / f"{name}.py").write_text(f"import {name}\n")
    monkeypatch.setattr(hvdlite, "__path__", [*hvdlite.__path__, str(ours)])
    monkeypatch.syspath_prepend(tmp_path)
    return ours


def test_extensions(frameworks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert util.EXTENSIONS == ["tensorflow", "torch", "mxnet"]
    assert util.extension_available("theirs", verbose=True)
    assert not util.extension_available("absent", verbose=True)
    assert not util.extension_available("json"), "a module, but not one that hvdlite knows"
    assert capsys.readouterr().out == (
        "theirs can be used with hvdlite: yes\nabsent can be used with hvdlite: no\n"
    )
    assert "hvdlite.theirs" not in sys.modules, "nothing is imported"


def test_check_extension(frameworks: Any) -> None:
    for name in ("hvdlite.theirs", "horovod.theirs", "horovod.theirs.part", "theirs"):
        util.check_extension(name, "HOROVOD_WITH_THEIRS", "/a/path", "mpi_lib")
    with pytest.raises(ImportError, match="pip install absent") as raised:
        util.check_extension("hvdlite.absent", "HOROVOD_WITH_ABSENT", "/a/path")
    assert raised.value.name == "absent"
    with pytest.raises(ImportError, match="hvdlite has nothing for mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", "/a/path", "mpi_lib")


@pytest.mark.parametrize("answer", [True, False])
def test_a_gpu_is_asked_for_in_another_process(
    answer: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, frameworks: Any
) -> None:
    package = tmp_path / "hvdlite"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "theirs.py").write_text(f"def _check_has_gpu():\n    return {answer}\n")
    util._has_gpu.cache_clear()
    assert util.gpu_available("theirs") is answer
    assert "hvdlite.theirs" not in sys.modules
    monkeypatch.setattr(subprocess, "run", None)
    assert util.gpu_available("theirs") is answer, "asked once"
    util._has_gpu.cache_clear()


def test_no_gpu_without_the_framework(
    frameworks: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert util.gpu_available("numpy") is False
    monkeypatch.setattr(subprocess, "run", None)
    assert util.gpu_available("absent", verbose=True) is False
    out, err = capfd.readouterr()
    assert out.endswith("absent sees a GPU: no\n")
    assert err == ""


@pytest.mark.torch
def test_torch_sees_the_gpu_that_torch_sees() -> None:
    torch = pytest.importorskip("torch")
    assert util.gpu_available("torch") is torch.cuda.is_available()


def test_what_only_compiled_code_needs_is_absent() -> None:
    module: ModuleType = util
    for name in ("get_ext_suffix", "get_extension_full_path", "check_installed_version"):
        assert not hasattr(module, name)
