"""The three hosts as the site of the scenarios; their launcher runs in nodea."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.hosts.lab import HOSTS, ROOT, SHARED, Lab, child_of
from tests.launcher.elastic.jobs import Watch
from tests.launcher.elastic_scenarios.sites import Site
from tests.launcher.jobs import IMPATIENT

# That of this machine, so that no host compiles again.
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")


class ThreeHosts(Site):
    """The hosts of a lab. That nothing is left in them is said by its fixture."""

    hosts = HOSTS
    used = 3

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        folder = Path(tempfile.mkdtemp(dir=lab.folder / "shared"))
        super().__init__(folder, SHARED / folder.name)

    @contextlib.contextmanager
    def launch(self, *words: str, **variables: str) -> Iterator[Watch]:
        """See `Site.launch`."""
        variables.setdefault("PYTHONPATH", str(ROOT))
        variables.setdefault("HVDLITE_ELASTIC_CHECK", "1")
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(self.inside / "inductor")  # Not in /tmp.
        variables["XDG_CACHE_HOME"] = CACHE
        with self.lab.start(HOSTS[0], *IMPATIENT, *words, **variables) as running:
            watch = Watch(running.process)
            try:
                yield watch
            finally:
                with contextlib.suppress(ProcessLookupError):
                    running.signal(signal.SIGKILL)
                watch.close()
                self._remove_what_frameworks_leave()

    def _remove_what_frameworks_leave(self) -> None:
        """Remove the code that TensorFlow has generated in workers that were killed."""
        for node in self.lab.nodes.values():
            for path in node.path("/tmp").glob("__*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextlib.contextmanager
    def beside(self, host: str, *command: str) -> Iterator[subprocess.Popen[str]]:
        """See `Site.beside`."""
        with self.lab.start(host, *command, PYTHONPATH=str(ROOT)) as running:
            yield running.process

    def outside(self, host: str, pid: int) -> int:
        """See `Site.outside`."""
        return self.lab.outside(host, pid)

    def signal_launcher(self, watch: Watch, number: int) -> None:
        """See `Site.signal_launcher`."""
        launcher = child_of(watch.process)  # Its parent waits for it.
        assert launcher is not None
        os.kill(launcher, number)

    def workers(self) -> dict[str, dict[int, str]]:
        """See `Site.workers`."""
        return {host: self.lab.processes(host) for host in HOSTS}
