"""The helpers of Horovod's common.util, for scripts and tools that use them."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

from hvdlite.common.api.options import resolve_op
from hvdlite.common.base.lists import split_list
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.runtime import basics

N = TypeVar("N", bound=int)

EXTENSIONS = ["tensorflow", "torch", "mxnet"]  # as in Horovod; not all of them are in hvdlite

_cache = functools.cache  # by positional and keyword arguments

# A release such as 2.6.0, and whether what follows makes it an earlier one, as in 2.6.0rc1.
_VERSION = re.compile(
    r"v?(\d+(?:\.\d+)*)(?:[-_.]?(a|alpha|b|beta|c|rc|pre|preview|dev)\d*\b)?", re.I
)
_TARGET = re.compile(r"\d+\.\d+\.\d+")
_HAS_GPU = """
import importlib, sys
sys.path[:] = sys.argv[2:]
module = importlib.import_module(sys.argv[1])
sys.exit(not getattr(module, "_check_has_gpu", bool)())
"""


# -- frameworks: `ext_base_name` and `ext` are names such as "torch"


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether hvdlite supports this framework, and the framework is installed."""
    available = _supported(ext_base_name) and find_spec(ext_base_name) is not None
    return _answer(f"{ext_base_name} can be used with hvdlite", available, verbose)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Check that the framework of a module such as ``hvdlite.torch`` is installed.

    Otherwise raises `ImportError`, which says what to install. The arguments after the first are
    those of Horovod, where they say what to compile; nothing is compiled here.
    """
    framework = ext_name.split(".")[1] if "." in ext_name else ext_name
    if extension_available(framework):
        return
    if not _supported(framework):
        raise ImportError(f"{ext_name}: hvdlite has nothing for {framework}", name=ext_name)
    raise ImportError(
        f"{ext_name} needs {framework}, which is not installed: pip install {framework}",
        name=framework,
    )


def gpu_available(ext: str, verbose: bool = False) -> bool:
    """Return whether this framework sees a GPU; False if it is not installed."""
    available = extension_available(ext, verbose) and _has_gpu(ext)
    return _answer(f"{ext} sees a GPU", available, verbose)


@_cache
def _has_gpu(ext: str) -> bool:
    """Ask in another process: after a call of CUDA, forked processes cannot use it any more."""
    command = [sys.executable, "-c", _HAS_GPU, f"hvdlite.{ext}", *sys.path]
    return subprocess.run(command, check=False).returncode == 0


def _supported(framework: str) -> bool:
    return find_spec(f"hvdlite.{framework}") is not None


# -- what hvdlite is built on: the same for all frameworks, so no framework is imported


def mpi_built(verbose: bool = False) -> bool:
    """Return whether mpi4py is installed."""
    return _answer("hvdlite has MPI", basics.mpi_built(), verbose)


def gloo_built(verbose: bool = False) -> bool:
    """Return True: ranks can meet and talk over TCP, for which Horovod needs Gloo."""
    return _answer("hvdlite has what Horovod needs Gloo for (TCP)", basics.gloo_built(), verbose)


def nccl_built(verbose: bool = False) -> int:
    """Return 0: hvdlite does not use NCCL."""
    return _answer("hvdlite has NCCL", basics.nccl_built(), verbose)


def ddl_built(verbose: bool = False) -> bool:
    """Return False: hvdlite does not use DDL."""
    return _answer("hvdlite has DDL", basics.ddl_built(), verbose)


def ccl_built(verbose: bool = False) -> bool:
    """Return False: hvdlite does not use oneCCL."""
    return _answer("hvdlite has oneCCL", basics.ccl_built(), verbose)


def _answer(statement: str, answer: N, verbose: bool) -> N:
    if verbose:
        sys.stdout.write(f"{statement}: {'yes' if answer else 'no'}\n")
    return answer


# -- the rest


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for the time of a ``with`` block; those that are None stay as is.

    Afterwards each of them is what it was before.
    """
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    try:
        os.environ.update(wanted)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[Any, bool | None], Any]:
    """Return a function of ``(op, average)`` that gives the op; `average` is deprecated.

    `reduce_ops` is anything with attributes ``Average`` and ``Sum``, such as ``hvdlite.torch``. The
    function gives `op` if that is given, Average if neither is. It warns of `average`, and raises
    `ValueError` if both are given.
    """

    def operation(op: Any, average: bool | None) -> Any:
        if op is not None and average is None:
            return op
        average_or_sum = resolve_op(average, op)
        return reduce_ops.Average if average_or_sum is ReduceOp.AVERAGE else reduce_ops.Sum

    return operation


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: object) -> bool:
    """Return whether ``iter(x)`` works."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


@_cache
def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether version `ver` is `target` or later; ``2.6.0rc1`` is before ``2.6.0``.

    Raises `ValueError` unless both are strings, `target` is of the form major.minor.patch in
    numbers, and `ver` begins with a number.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions are compared as strings, not {ver!r} and {target!r}")
    if not _TARGET.fullmatch(target):
        raise ValueError(f"the target version must be major.minor.patch, not {target!r}")
    match = _VERSION.match(ver)
    if match is None:
        raise ValueError(f"{ver!r} is not a version")
    is_release = match[2] is None
    return (_numbers(match[1]), is_release) >= (_numbers(target), True)


def _numbers(release: str) -> list[int]:
    """Split a release, without zeros at its end: 2.6 and 2.6.0 are the same."""
    return [int(number) for number in re.sub(r"(\.0+)+$", "", release).split(".")]


__all__ = [
    "EXTENSIONS",
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]
