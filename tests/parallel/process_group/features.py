"""Features that one job of real ranks tries one after the other, each by itself.

A feature is a function that raises unless it works on this rank. Rank 0 prints a line for each:
``FEATURE ranks name ok``, or instead of ok ``skip: why`` or ``rank: what went wrong``.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import hvdlite.torch as hvd


class Skipped(Exception):  # noqa: N818 - it is none
    """This release of torch lacks the feature, also over its own backends."""


Check = Callable[[], None]


@dataclass(frozen=True)
class Feature:
    """A feature, and the numbers of ranks that it is tried with."""

    name: str
    check: Check
    sizes: tuple[int, ...]


FEATURES: dict[str, Feature] = {}


def feature(*sizes: int) -> Callable[[Check], Check]:
    """Register a feature that is tried with `sizes` ranks, 4 by default."""

    def register(check: Check) -> Check:
        name = check.__name__
        assert name not in FEATURES, name
        FEATURES[name] = Feature(name, check, sizes or (4,))
        return check

    return register


def names(size: int) -> list[str]:
    """The features of a job of `size` ranks."""
    return [feature.name for feature in FEATURES.values() if size in feature.sizes]


def world() -> Any:
    """The default process group."""
    return dist.group.WORLD


def run(chosen: list[str], timeout: timedelta) -> None:
    """Try features on this rank, and tell on rank 0 what all ranks have found."""
    for name in chosen:
        start, found = time.monotonic(), ""
        try:
            world().set_timeout(timeout)  # Some features leave a group of their own.
            FEATURES[name].check()
        except Skipped as why:
            found = f"skip: {why}"
        except BaseException:
            found = traceback.format_exc()
            print(f"rank {hvd.rank()}, {name}: {found}", file=sys.stderr, flush=True)
        if not dist.is_initialized():
            hvd.init_process_group(timeout)
        everywhere = hvd.allgather_object(found, f"found.{name}")
        for rank, text in enumerate(everywhere):
            if text:
                found = text if text.startswith("skip") else f"rank {rank}: {text}"
                break
        if any(everywhere):  # Calls of this feature may be pending.
            dist.destroy_process_group()
            hvd.init_process_group(timeout)
        if hvd.rank() == 0:
            seconds = time.monotonic() - start
            line = found.replace("\n", "\\n") or "ok"
            if "TIMES" in os.environ:
                print(f"{seconds:6.2f} s  {name}", flush=True)
            # In one write, whatever others write to the same pipe.
            print(f"FEATURE {hvd.size()} {name} {line}\n", end="", flush=True)
