"""hvdlite-run for tests, which says what the hosts of a job have told it for its live view.

``gathered NUMBER HOST RANKS BYTES SECONDS HOSTS`` for each message: how many ranks are in it, when
it came, and the hosts of all ranks that the view then knows.
"""

from __future__ import annotations

import itertools
import runpy
import sys
import time
from collections.abc import Mapping

from hvdlite.launcher.live.live_view import LiveView

receive = LiveView.receive
numbers = itertools.count()


def counted(self: LiveView, host: str, lines: Mapping[int, str]) -> None:
    """Take the lines of a host as it does."""
    receive(self, host, lines)
    hosts = ",".join(sorted({rank.host for rank in self.job.ranks.values()}))
    size = sum(map(len, lines.values()))
    words = (next(numbers), host, len(lines), size, time.monotonic(), hosts)
    print("gathered", *words, file=sys.stderr, flush=True)


LiveView.receive = counted
if __name__ == "__main__":
    runpy.run_module("tests.launcher.impatient", run_name="__main__")
