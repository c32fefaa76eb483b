"""Asks all hosts at once whether a job can run on them, by one ssh and `probe.py` for each.

Nothing has to be installed there but a Python at the path of ours. Everything has a limit: a host
that does not answer becomes a sentence of the report.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlite.common.connections.loop import Timer
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.hosts.host_report import PACKAGES, Attempt, Facts, HostReport
from hvdlite.launcher.hosts.hosts import Host
from hvdlite.launcher.hosts.probe import MARK
from hvdlite.launcher.hosts.ssh import (
    MOST_AT_ONCE,
    agent_path,
    connect_seconds,
    explain_agent,
    explain_silence,
    ssh_command,
)
from hvdlite.launcher.processes.child import LeadingProcess
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.signals import interrupt_waits

MOST_PEERS = 16  # A host tries so many others; all pairs of many hosts would be too many.
LOGIN_FACTOR = 1.5  # of the time to connect: until Python runs there
ANSWER_SECONDS = 30.0  # then until it has imported what it looks at, from a slow disk at first
ATTEMPT_SECONDS = 2.0  # for a connection between two hosts
END_SECONDS = 1.0
HERE = "this host"  # its name where the user has given it none
FIRST_LINES = 50  # so many lines of what is said are kept
# The first question brings the program along.
BOOTSTRAP = (
    "import sys, json; question = json.loads(sys.stdin.readline()); program = {'__name__': 'probe'}"
    "; exec(compile(question['program'], 'probe.py', 'exec'), program); program['main'](question)"
)


def check_hosts(
    hosts: Sequence[Host],
    options: LaunchOptions,
    environ: Mapping[str, str],
    *,
    mpi: bool,
    ports: Sequence[int] = (0,),
) -> HostReport:
    """Return what the probes find on `hosts`, and between them.

    Where MPI starts the ranks, its daemons connect to this machine, so it is one of the hosts. The
    probes listen on one of `ports`; 0 is any. Raises `ConfigError` where there is no ssh here.
    """
    directory, seconds = os.getcwd(), connect_seconds(options) * LOGIN_FACTOR
    loop = EventLoop()
    commands = {host.name: _command(host, options, environ) for host in hosts}
    if mpi and all(host.remote for host in hosts):
        commands = {HERE: [sys.executable, "-c", BOOTSTRAP], **commands}
    conversations = [
        Conversation(name, command, environ, seconds, loop) for name, command in commands.items()
    ]
    question = _question(directory, ports, environ)
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        for each in conversations:
            stack.callback(each.close)
        stack.callback(_let_end, conversations)
        _ask(loop, conversations, lambda each: {**question, "nonce": each.nonce})
        facts = {
            each.name: Facts.from_answer(each.answer).only(options.network_interfaces)
            for each in _answered(conversations)
        }
        here = facts[HERE].identity if HERE in facts else None
        if sum(each.identity == here for each in facts.values()) > 1:  # Under another name, too.
            facts.pop(HERE)
            conversations = [each for each in conversations if each.name != HERE]
        peers = _peers(_answered(conversations), facts)
        _ask(loop, _answered(conversations), lambda each: {
            "seconds": ATTEMPT_SECONDS,
            "peers": [[address, port, nonce] for _, address, port, nonce in peers[each.name]],
        })  # fmt: skip
        attempts = _attempts(_answered(conversations), peers)
    failures = {each.name: each.failure for each in conversations if each.failure}
    facts = {name: each for name, each in facts.items() if name not in failures}
    attempts = [each for each in attempts if each.target in facts]
    return HostReport(
        facts=facts, failures=failures, attempts=attempts, directory=directory, mpi=mpi
    )


class Conversation:
    """The probe on one host: the process that leads to it, and the last answer or the failure."""

    def __init__(
        self, name: str, command: Sequence[str], environ: Mapping[str, str],
        login_seconds: float, loop: EventLoop,
    ) -> None:  # fmt: skip
        self.name = name
        self.nonce = secrets.token_hex(16)
        self.answer: dict[str, Any] = {}
        self.failure = ""
        self.waits = False  # for an answer
        self._command, self._environ, self._loop = command, environ, loop
        self._login_seconds = login_seconds
        self._runs = False  # Python has started
        self._has_ended = False  # perhaps between two questions
        self._unread = b""
        self._said: list[str] = []  # before Python has started, on standard output
        self._timer = Timer(self._give_up)
        self.leader: LeadingProcess | None = None  # To Python there.

    def ask(self, question: Mapping[str, Any]) -> None:
        """Send a question. It fits into the pipe, so this does not wait for the reader."""
        self.waits = True
        self._limit(ANSWER_SECONDS if self._runs else self._login_seconds)
        if self.leader is None:
            with interrupt_waits():
                self.leader = LeadingProcess(
                    self._command, self._environ, self._loop, signal.SIGKILL, printed=self._hear
                )
        with contextlib.suppress(BrokenPipeError):
            self.leader.write(json.dumps(question).encode() + b"\n")
        if self._has_ended:
            self._end()

    def _limit(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_after(seconds, self._give_up)

    def _hear(self, data: bytes) -> None:
        """Take what the probe has printed, and perhaps the shell before it."""
        if not data:
            self._has_ended = True
            self._end()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for text in (line.decode(errors="replace") for line in lines):
            if not text.startswith(MARK):
                self._said += [text][: FIRST_LINES - len(self._said)]
            elif not self._runs:
                self._runs = True
                self._limit(ANSWER_SECONDS)
            else:
                self.answer = json.loads(text[len(MARK) :])
                self.waits = False

    def _end(self) -> None:
        """Conclude from the end of the process why there is no answer."""
        if self.waits and self.leader is not None:
            self.leader.wait(END_SECONDS)
            said = "\n".join([*self._said, self.leader.said()])
            self._fail(explain_agent(self.name, said, self.leader.code))

    def _give_up(self) -> None:
        if self.waits:
            seconds = ANSWER_SECONDS if self._runs else self._login_seconds
            self._fail(explain_silence(self.name, seconds, runs=self._runs))

    def _fail(self, sentence: str) -> None:
        self.failure = sentence
        self.waits = False

    def close(self) -> None:
        """Leave no process and no open file behind."""
        if self.leader is not None:
            self.leader.close()


def _ask(
    loop: EventLoop, conversations: Sequence[Conversation],
    question: Callable[[Conversation], dict[str, Any]],
) -> None:  # fmt: skip
    """Send each probe its question, and wait until each has answered or failed."""
    waiting = deque(conversations)
    while (asked := sum(each.waits for each in conversations)) or waiting:
        if waiting and asked < MOST_AT_ONCE:
            each = waiting.popleft()
            each.ask(question(each))
        else:
            loop.run_once()


def _answered(conversations: Sequence[Conversation]) -> list[Conversation]:
    return [each for each in conversations if not each.failure]


def _let_end(conversations: Sequence[Conversation]) -> None:
    """Let the probes find the end of their input, and give those that answered a moment."""
    deadline = time.monotonic() + END_SECONDS
    for each in conversations:
        if each.leader is not None:
            each.leader.close_input()
    for each in _answered(conversations):
        if each.leader is not None:
            each.leader.wait(deadline - time.monotonic())


def _command(host: Host, options: LaunchOptions, environ: Mapping[str, str]) -> list[str]:
    command = [sys.executable, "-c", BOOTSTRAP]
    if not host.remote:
        return command
    return ssh_command(host.name, f"exec {shlex.join(command)}", options, environ.get("PATH"))


def _question(directory: str, ports: Sequence[int], environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        "program": Path(__file__).with_name("probe.py").read_text(encoding="utf-8"),
        "path": agent_path(environ).split(os.pathsep),
        "packages": list(PACKAGES),
        "directory": directory,
        "ports": list(ports),
    }


Peer = tuple[str, str, int, str]  # name of the host, address, port, nonce


def _peers(
    conversations: Sequence[Conversation], facts: Mapping[str, Facts]
) -> dict[str, list[Peer]]:
    """Return which addresses each host has to try: those of the hosts that follow it."""
    peers: dict[str, list[Peer]] = {}
    for at, each in enumerate(conversations):
        around = [*conversations[at + 1 :], *conversations[:at]][:MOST_PEERS]
        own = facts[each.name].identity
        peers[each.name] = [
            (other.name, address.address, facts[other.name].port, other.nonce)
            for other in around
            if facts[other.name].identity != own
            for address in facts[other.name].addresses
        ]
    return peers


def _attempts(
    conversations: Sequence[Conversation], peers: Mapping[str, Sequence[Peer]]
) -> list[Attempt]:
    return [
        Attempt(each.name, target, address, error)
        for each in conversations
        for (target, address, *_), (_, error) in zip(
            peers[each.name], each.answer["attempts"], strict=True
        )
    ]  # fmt: skip
