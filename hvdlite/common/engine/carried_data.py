"""What a rank sends inside its requests; see [Note: data inside requests]."""

from __future__ import annotations

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.collectives.carried import may_be_carried
from hvdlite.common.collectives.hosts import HostsBackend
from hvdlite.common.engine.executor import Executor
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.process_set_table import ProcessSetTable


class CarriedData:
    """The data of entries that go with their requests. Used by the engine thread."""

    def __init__(self, rank: int, executor: Executor, process_sets: ProcessSetTable) -> None:
        self._rank = rank
        self._executor = executor
        self._process_sets = process_sets

    def of(self, entry: Entry) -> bytes | None:
        """Return the data of an entry whose sum is the same wherever it is added up, or None."""
        request = entry.request
        ranks = self._process_sets.find(request.process_set_id)
        if ranks is None or self._rank not in ranks:
            return None
        members = self._executor.members_of(ranks)
        if not may_be_carried(request, entry.size_bytes, members.topology):
            return None
        try:
            backend = self._executor.backend(request, members)
        except (ConfigError, HorovodInternalError):  # The call fails when it runs, on all ranks.
            return None
        if not isinstance(backend, HostsBackend) or not backend.doubles(members, entry.size_bytes):
            return None
        return entry.input.tobytes()
