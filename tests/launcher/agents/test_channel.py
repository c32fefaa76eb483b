"""The channel between launcher and agents, byte by byte; and meetings that are merged."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import msgpack
import pytest

from hvdlite.common.connections import frames
from hvdlite.common.meeting.rounds import Key, Rounds
from hvdlite.launcher.agent_process.agent import Agent
from hvdlite.launcher.agents.channel import MOST_BYTES, PROLOGUE, Channel
from hvdlite.launcher.decisions.merged_meeting import MergedMeeting
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.signals import SignalInbox


class End:
    """One end of a channel, with what it has heard; `peer` is the raw other end: read, write."""

    def __init__(self, prologue: bytes = b"") -> None:
        self.loop = EventLoop()
        self.heard: list[tuple[str, list[Any]]] = []
        self.ended = 0
        theirs_read, ours_write = os.pipe()
        ours_read, theirs_write = os.pipe()
        self.peer_read, self.peer_write = theirs_read, theirs_write
        self.channel = Channel(
            self.loop, ours_read, ours_write, prologue=prologue,
            received=lambda kind, fields: self.heard.append((kind, fields)), ended=self._end,
        )  # fmt: skip

    def _end(self) -> None:
        self.ended += 1

    def run(self) -> None:
        while self.loop.run_once(0.05):
            pass

    def close(self) -> None:
        self.channel.close()
        self.loop.close()
        for fd in (self.peer_read, self.peer_write):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def end() -> Iterator[End]:
    made = End()
    yield made
    made.close()


def frame(*message: Any) -> bytes:
    return frames.frame(frames.pack(message))


def test_messages_come_whole_however_they_are_cut(end: End) -> None:
    data = frame("a", 1, b"x" * 10) + frames.BEAT + frame("b", {"k": [1, 2]}, {3: b""})
    for index in range(len(data)):
        os.write(end.peer_write, data[index : index + 1])
        end.run()
    assert end.heard == [("a", [1, b"x" * 10]), ("b", [{"k": [1, 2]}, {3: b""}])]
    assert end.ended == 0


def test_what_a_shell_has_printed_before_is_skipped() -> None:
    end = End(PROLOGUE)
    try:
        for part in (b"motd \0hvd", b"lite\n" * 1000, PROLOGUE[:5], PROLOGUE, frame("a")[:3]):
            os.write(end.peer_write, part)
            end.run()
        os.write(end.peer_write, frame("a")[3:])
        end.run()
        assert end.heard == [("a", [])]
    finally:
        end.close()


@pytest.mark.parametrize(
    "garbage",
    [frames.PREFIX.pack(MOST_BYTES + 1, 0), frames.frame(b"\xc1"), frames.frame(b"\x01\x02")],
)
def test_what_is_no_message_ends_the_channel(end: End, garbage: bytes) -> None:
    os.write(end.peer_write, garbage)
    end.run()
    assert (end.heard, end.ended, end.channel.open) == ([], 1, False)


def test_sending_never_waits_and_nothing_is_lost(end: End) -> None:
    for number in range(100):
        end.channel.send("part", number, b"y" * 100_000)
    assert end.channel.queued_bytes > 9_000_000
    end.channel.close_writing()
    data = b""
    while True:
        end.loop.run_once(0.0)
        part = os.read(end.peer_read, 1 << 20)
        if not part:
            break
        data += part
    assert data == b"".join(frame("part", number, b"y" * 100_000) for number in range(100))
    assert end.channel.queued_bytes == 0


def test_a_feed_is_fetched_only_as_fast_as_it_is_read(end: End) -> None:
    """A slow reader costs the memory of one message, however many there are."""
    fetched, fed = [], []

    def messages() -> Iterator[tuple[str, int, bytes]]:
        for number in range(50):
            fetched.append(number)
            yield "part", number, b"z" * 300_000

    end.channel.feed(messages(), lambda: fed.append(len(fetched)))
    end.run()
    assert (fetched, fed) == ([0], [])  # Nobody reads.
    end.channel.send("signal", 15)
    os.set_blocking(end.peer_read, False)
    data = b""
    most_queued = 0
    while not fed:
        end.loop.run_once(0.0)
        most_queued = max(most_queued, end.channel.queued_bytes)
        with contextlib.suppress(BlockingIOError):
            data += os.read(end.peer_read, 1 << 16)
    assert fed == [50]
    assert most_queued < 301_000
    end.channel.send("start")
    end.run()
    data += os.read(end.peer_read, 1 << 20)
    first, *rest = [frame("part", number, b"z" * 300_000) for number in range(50)]
    assert data == b"".join([first, frame("signal", 15), *rest, frame("start")])


def test_a_feed_ends_with_its_channel(end: End) -> None:
    os.close(end.peer_read)
    end.peer_read = -1
    messages = iter([("part", 0, b"")] * 3)
    end.channel.feed(messages, lambda: pytest.fail("all was sent"))
    end.run()
    assert len(list(messages)) == 2
    end.channel.feed(iter(()), lambda: pytest.fail("all was sent"))
    end.run()


def test_names_that_are_no_text_are_sent(end: End) -> None:
    name = os.fsdecode(b"caf\xe9")
    end.channel.send("job", name)
    data = os.read(end.peer_read, 100)
    os.write(end.peer_write, data)
    end.run()
    assert end.heard == [("job", [name])]


def test_the_end_is_told_once(end: End) -> None:
    os.close(end.peer_write)
    end.peer_write = -1
    end.run()
    end.channel.send("late")
    assert (end.ended, end.channel.open) == (1, False)


def test_silence_is_a_loss_but_not_what_waits_to_be_read(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    awake, later = end.loop.awake_seconds() + 10, time.monotonic() + 10
    monkeypatch.setattr(end.loop, "awake_seconds", lambda: awake)
    assert end.channel.beat(later - 5, 11)
    assert not end.channel.beat(later, 5)
    os.write(end.peer_write, frames.BEAT)
    assert end.channel.beat(later, 5)
    assert frames.BEAT in os.read(end.peer_read, 100)


# -- meetings


def test_a_round_is_complete_when_all_hosts_have_gathered() -> None:
    meeting = MergedMeeting(4)
    assert meeting.add([], 0, {1: b"b", 0: b"a"}) is None
    assert meeting.missing([], 0) == [2, 3]
    assert meeting.add([], 0, {3: b"d", 2: b"c"}) == [b"a", b"b", b"c", b"d"]
    assert meeting.missing([], 0) == [0, 1, 2, 3]  # it is over
    assert list(meeting.news()) == []


def test_who_came_is_known_before_a_host_has_gathered() -> None:
    meeting = MergedMeeting(5)
    meeting.add([], 0, {0: b"a"})
    meeting.note([], 0, [1, 2], [1])
    meeting.note([], 0, [3, 4], [3])
    assert list(meeting.news()) == [([], [2, 4])]
    assert list(meeting.news()) == []
    meeting.note([], 0, [1, 2], [])  # it has left again
    assert list(meeting.news()) == [([], [1, 2, 4])]


def test_meetings_of_parts_are_apart_and_have_their_order() -> None:
    meeting = MergedMeeting(3)
    assert meeting.add([2, 0], 0, {0: b"x"}) is None
    assert meeting.add([], 0, {0: b"y"}) is None
    assert meeting.add([2, 0], 0, {2: b"z"}) == [b"z", b"x"]


def test_a_host_may_take_back_what_it_has_gathered() -> None:
    meeting = MergedMeeting(2)
    meeting.add([], 0, {0: b"old"})
    meeting.withdraw([], 0, [0])
    assert meeting.add([], 0, {1: b"b"}) is None
    assert meeting.add([], 0, {0: b"new"}) == [b"new", b"b"]


class Gathering:
    """Two hosts with two ranks each, whose rounds are merged when `merge` is called."""

    def __init__(self) -> None:
        self.merged = MergedMeeting(4)
        self.sent: list[tuple[list[int], Key, dict[int, bytes] | None]] = []
        self.answers: dict[str, list[Any]] = {}
        self.hosts = [self._host([0, 1]), self._host([2, 3])]

    def _host(self, ranks: list[int]) -> Rounds:
        return Rounds(
            ranks, 4,
            gathered=lambda key, bodies: self.sent.append((ranks, key, bodies)),
            withdrawn=lambda key: self.sent.append((ranks, key, None)),
        )  # fmt: skip

    def come(self, rank: int, body: str) -> Any:
        """Let a rank come with a body, to which `answers` gets what it is told."""
        answers = self.answers[body] = []

        class Rank:
            members = ()
            given = 0

            def send(self, head: bytes) -> None:
                answers.append(msgpack.unpackb(head))

        guest: Any = Rank()
        guest.rank = rank
        self.hosts[rank // 2].present(guest)
        self.hosts[rank // 2].give(guest, body.encode())
        return guest

    def merge(self) -> list[tuple[Key, list[bytes]]]:
        """Take what the hosts have sent; return what goes to them."""
        whole = []
        sent, self.sent = self.sent, []
        for ranks, key, bodies in sent:
            if bodies is None:
                self.merged.withdraw(key.members, key.number, ranks)
            elif merged := self.merged.add(key.members, key.number, bodies):
                whole.append((key, merged))
        return whole

    def deliver(self, whole: list[tuple[Key, list[bytes]]]) -> None:
        for key, bodies in whole:
            for host in self.hosts:
                host.deliver(key, bodies)


@pytest.mark.parametrize("again", [True, False])
def test_a_rank_that_leaves_while_the_answer_is_under_way(again: bool) -> None:
    """Nobody gets what it gave before, neither now nor when all meet once more."""
    job = Gathering()
    job.come(0, "a0")
    leaver = job.come(1, "a1")
    job.come(2, "a2")
    job.come(3, "a3")
    under_way = job.merge()
    job.hosts[0].leave(leaver)
    if again:
        job.come(1, "b1")
    job.deliver(under_way)
    for waiting in ["a0", "b1"] if again else ["a0"]:
        assert [answer[0] for answer in job.answers[waiting]] == ["fail"]
        assert job.answers[waiting][0][1].startswith("rank 1 has left")
    assert job.merge() == []
    for host in job.hosts:
        for guest in list(host.guests.values()):
            host.leave(guest)
    for rank in (2, 3, 0, 1):  # The host that had gathered twice comes last.
        job.come(rank, f"c{rank}")
        job.deliver(job.merge())
    expected = ["bodies", 0, [b"c0", b"c1", b"c2", b"c3"]]
    assert all(job.answers[f"c{rank}"] == [expected] for rank in range(4))


@contextlib.contextmanager
def running_agent() -> Iterator[tuple[Agent, End]]:
    """Yield an agent of this process that has said hello, and the launcher's end."""
    end = End(PROLOGUE)
    with SignalInbox() as signals:
        agent = Agent(end.peer_read, end.peer_write, signals)
        try:
            agent.begin()
            yield agent, end
        finally:
            agent.channel.close()
            agent.end()
            agent.loop.close()
            end.peer_read = end.peer_write = -1
            end.close()


def test_an_agent_that_is_told_to_end_before_its_job() -> None:
    with running_agent() as (agent, end):
        os.kill(os.getpid(), signal.SIGTERM)
        agent.turn()
        end.channel.send("job", {"directory": ".", "elastic": True})
        end.run()
        agent.loop.run_once(5.0)
        end.run()
    assert [kind for kind, _ in end.heard] == ["hello", "refused"]
    assert end.heard[1][1] == ["got a signal to end before the job began"]


JOB = {
    "directory": ".", "call": None, "silence_seconds": 0.0, "inherit": True, "variables": {},
    "elastic": False, "rendezvous": "", "secret": "s", "host": "a", "ranks": [0, 1], "size": 2,
    "token": "t", "bind": False,
}  # fmt: skip


@pytest.mark.timeout(60)
def test_numbers_of_processes_that_have_ended_are_not_signalled(
    signalled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that of a server that was started again, nor those of ranks without children."""
    monkeypatch.setattr("hvdlite.launcher.agent_process.agent.HostMeeting", MagicMock())
    with running_agent() as (agent, end):

        def tell(kind: str, *fields: Any, until: str, count: int) -> list[list[Any]]:
            end.channel.send(kind, *fields)
            while len(heard := [each for name, each in end.heard if name == until]) < count:
                end.loop.run_once(0.01)
                agent.loop.run_once(0.01)
                agent.turn()
            return heard

        def start(number: int, rank: int, script: str) -> None:
            tell("start", number, {
                "rank": rank, "local_rank": 0, "variables": {}, "terminals": {},
                "command": ["/bin/sh", "-c", script],
            }, until="started", count=number + 1)  # fmt: skip

        tell("job", JOB, until="ready", count=1)
        start(0, 0, "exit 0")
        start(1, 1, "exit 3")
        start(2, 2, "sleep 1000 & kill -9 $$")
        tell("count", until="exit", count=3)
        start(3, 2, "exec sleep 1000")
        pids = [fields[1] for name, fields in end.heard if name == "started"]
        assert signalled == [pids[2]]
        codes = dict(tell("signal", int(signal.SIGTERM), [], until="exit", count=4))
    assert codes == {0: 0, 1: 3, 2: -signal.SIGKILL, 3: -signal.SIGTERM}
    assert pids[3] in signalled and pids[0] not in signalled and signalled.count(pids[2]) == 1
