"""The three hosts as the site of clusters: each kind of process begins on another host."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.hosts.lab import HOSTS, READY_SECONDS, SHARED, Lab, address
from tests.ps.sites import Site

FIRST = {"scheduler": 0, "server": 1, "worker": 2}
PORTS = iter(range(4300, 9000))  # In hosts, nobody else listens there.


class ThreeHosts(Site):
    """The hosts of a lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        folder = Path(tempfile.mkdtemp(dir=lab.folder / "shared"))
        super().__init__(folder, SHARED / folder.name)

    def _host(self, role: str, number: int) -> str:
        return HOSTS[(FIRST[role] + number) % len(HOSTS)]

    def address(self, role: str, number: int = 0) -> str:
        """See `Site.address`."""
        return address(self._host(role, number))

    def first_process(self, role: str, number: int) -> int | None:
        """See `Site.first_process`."""
        return self.lab.nodes[self._host(role, number)].pid

    def program_of(self, process: int) -> int:
        """See `Site.program_of`: what was started has made a child in the host, and waits."""
        limit = time.monotonic() + READY_SECONDS
        while not (found := Path(f"/proc/{process}/task/{process}/children").read_text().split()):
            assert time.monotonic() < limit
            time.sleep(0.002)
        return int(found[0])

    @contextlib.contextmanager
    def port(self) -> Iterator[int]:
        """See `Site.port`."""
        yield next(PORTS)
