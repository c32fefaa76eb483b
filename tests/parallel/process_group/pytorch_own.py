"""PyTorch's own tests of torch.distributed, which ship inside of its wheel, over hvdlite.

    hvdlite-run -np 4 python -m tests.parallel.process_group.pytorch_own [NAME | -NAME ...]

All tests run in one job, one after the other, each in a default group of its own. Rank 0 prints
``OWN name pass``, ``OWN name skip: why`` or ``OWN name fail: rank and error`` for each. What fails,
and why, is told in docs/pytorch_own_tests.md.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
import unittest
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import hvdlite.torch as hvd

TIMEOUT = timedelta(seconds=4)
# Of a test in which some ranks wait for longer than that, and the others for them.
LONGER = {"test_barrier_timeout_group": timedelta(seconds=30)}
# They end a process, wait for minutes, or test what is no process group.
LEFT_OUT = ("test_verify_model_across_rank", "test_ddp_has_finalized")


def load() -> Any:
    """The class of the tests, without the processes that it would start for each of them."""
    os.environ.update(BACKEND="hvdlite", WORLD_SIZE=str(hvd.size()), INIT_METHOD="hvdlite://")
    os.environ["TEMP_DIR"] = hvd.broadcast_object(tempfile.mkdtemp(), 0)
    os.makedirs(os.path.join(os.environ["TEMP_DIR"], "test_dir"), exist_ok=True)
    from torch.testing._internal.distributed import distributed_test as own

    # It takes seconds to start each time, and records torch's own backends only.
    own._create_autograd_profiler = own._create_torch_profiler = contextlib.nullcontext  # type: ignore[assignment]

    class Tests(own.TestDistBackend, own.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            dist.barrier()

    return Tests


def run(tests: Any, name: str) -> str:
    """Run one test on this rank: "", "skip: why" or "fail: why"."""
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

    skips = {each.exit_code: each.message for each in TEST_SKIPS.values()}
    test = tests(name)
    test.rank, test.file_name = hvd.rank(), ""
    hvd.init_process_group(LONGER.get(name, TIMEOUT))
    set_rng_seed(1234)  # As each process of PyTorch's own runner begins.
    try:
        getattr(test, name)()
        dist.barrier()
    except unittest.SkipTest as why:
        return f"skip: {why}"
    except SystemExit as code:
        return f"skip: {skips.get(code.code, code)}"
    except BaseException as error:
        print(f"{name} on rank {hvd.rank()}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        text = (str(error).strip().splitlines() or [""])[0]
        return f"fail: {type(error).__name__} at {where}: {text[:200]}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return ""


def main() -> None:
    """Run the tests that are named, or all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    hvd.init()
    tests = load()
    every = [name for name in dir(tests) if name.startswith("test_")]
    if hvd.rank() == 0:
        print(f"{len(every)} tests of torch {torch.__version__}", flush=True)
    left_out = (*LEFT_OUT, *(word[1:] for word in sys.argv[1:] if word.startswith("-")))
    named = [word for word in sys.argv[1:] if not word.startswith("-")]
    chosen = named or [name for name in every if not name.startswith(left_out)]
    for name in chosen:
        found = hvd.allgather_object(run(tests, name), name)
        if hvd.rank() == 0:
            failed = [
                f"rank {rank}: {text}" for rank, text in enumerate(found) if text.startswith("fail")
            ]
            skipped = next((text for text in found if text.startswith("skip")), "")
            outcome = f"fail: {failed[0].replace('fail: ', '')}" if failed else skipped or "pass"
            print(f"OWN {name} {outcome}", flush=True)


if __name__ == "__main__":
    main()
