"""A worker of the tests that is busy when its driver goes: in Python code, or in a system call."""

from __future__ import annotations

import os
import time

import hvdlite.numpy as hvd
from tests.elastic.worker_allreduce import say


def main() -> None:
    """Do nothing of use."""
    hvd.init()
    say(epoch=1, step=0)
    while os.environ["BUSY"] == "python":
        pass
    time.sleep(60)


if __name__ == "__main__":
    main()
