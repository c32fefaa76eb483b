"""Versions of hvdlite that take part in one job."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from hvdlite.common.base.errors import HorovodVersionMismatchError
from hvdlite.common.transport import bootstrap
from hvdlite.common.transport.bootstrap import exchange_versions
from tests.ranks import run_threads
from tests.worlds import InProcessMeeting


def versions(said: Callable[[int], str], monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """Let three ranks compare their versions."""
    import threading

    mine = threading.local()
    monkeypatch.setattr(bootstrap, "installed_version", lambda: mine.version)
    meeting = InProcessMeeting(3)

    def rank_main(rank: int) -> list[bytes]:
        mine.version = said(rank)
        return exchange_versions(meeting.exchange(rank), b"%d" % rank)

    return run_threads(3, rank_main)


def test_one_warning_names_versions_that_understand_each_other_and_their_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hvdlite"):
        answers = versions(lambda rank: "1.2" if rank == 1 else "1.1", monkeypatch)
    assert answers == [[b"0", b"1", b"2"]] * 3
    [record] = caplog.records
    assert "1.1 on 0, 2; 1.2 on 1" in record.getMessage()


def test_equal_versions_are_worth_no_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hvdlite"):
        versions(lambda rank: "1.1", monkeypatch)
    assert not caplog.records


def test_another_protocol_ends_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = bootstrap.HELLO

    class Other:
        size = packed.size
        unpack = staticmethod(packed.unpack)

        @staticmethod
        def pack(magic: bytes, protocol: int, version: bytes) -> bytes:
            return packed.pack(magic, protocol + (version == b"1.2"), version)

    monkeypatch.setattr(bootstrap, "HELLO", Other)
    with pytest.raises(HorovodVersionMismatchError, match=r"1\.2"):
        versions(lambda rank: "1.2" if rank == 1 else "1.1", monkeypatch)
