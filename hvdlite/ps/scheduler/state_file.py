"""The file of what a scheduler has to know again: a state, and what was added to it since.

The state is the first line, and is always written whole. Each further line has additions, so that
many small ones cost what they are, and not each of them a copy of all that is known.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlite.common.settings.logs import log
from hvdlite.ps.connections import system


class StateFile:
    """`state` returns all that is to be written, as JSON can hold it. Without a path, nothing is.

    What was given to `write` or `add` is on disk when they return, unless the file is `unkept`.
    """

    def __init__(self, path: Path | None, state: Callable[[], Mapping[str, Any]]) -> None:
        self._path, self._state = path, state
        self.unkept = False  # It could not be written, and is to be.
        # Only lines that follow a state of this process are known to be whole.
        self._may_add = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> tuple[Mapping[str, Any], Sequence[Any]] | None:
        """Return the state and the additions, if there is a file.

        Whoever was killed while it added a line leaves half of it. Nobody has heard of that.
        """
        if self._path is None or not self._path.exists():
            return None
        first, *lines = self._path.read_text().split("\n")
        added = [*map(json.loads, lines[:-2])]
        for last in lines[-2:-1]:
            with contextlib.suppress(ValueError):
                added.append(json.loads(last))
        return json.loads(first), [each for line in added for each in line]

    def write(self) -> None:
        """Write the state; a file that is half written is never seen."""
        if self._path is None:
            return
        text = json.dumps(self._state()) + "\n"
        try:
            system.write_whole(self._path, [text.encode()])
        except OSError as error:
            self._fail(error)
        else:
            self.unkept, self._may_add = False, True

    def add(self, additions: Sequence[Any]) -> None:
        """Write what has come to the state since it was written, or the state, where that fails."""
        if self._path is None or not additions:
            return
        if self.unkept or not self._may_add:
            return self.write()
        try:
            system.append(self._path, (json.dumps(additions) + "\n").encode())
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self.unkept:
            why = "the scheduler cannot write %s: %s; it is tried again until it can"
            log.warning(why, self._path, error)
        self.unkept, self._may_add = True, False

    def forget(self) -> None:
        """Remove the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
