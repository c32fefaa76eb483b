"""Asks all hosts at once whether a job can run on them, by one ssh and `probe.py` for each.

Nothing has to be installed there but a Python at the path of ours. Everything has a limit: a host
that does not answer becomes a sentence of the report.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hvdlite
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.hosts.cores import print_cores_script
from hvdlite.launcher.hosts.host_facts import PACKAGES, Attempt, Facts
from hvdlite.launcher.hosts.host_report import HostReport
from hvdlite.launcher.hosts.hosts import Host
from hvdlite.launcher.hosts.probe import MARK
from hvdlite.launcher.hosts.ssh import agent_path, connect_seconds, ssh_command
from hvdlite.launcher.hosts.unreachable import explain_agent, explain_silence
from hvdlite.launcher.processes.signals import die_with_parent, interrupt_waits

MOST_AT_ONCE = 32  # So many ssh connect at the same time: each costs some memory and CPU here.
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
INTERFACES = Path("common", "transport", "tcp", "interfaces.py")


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
    directory = os.getcwd()
    connect = connect_seconds(options)
    conversations = [
        Conversation(host.name, _command(host, options, environ), connect) for host in hosts
    ]
    if mpi and all(host.remote for host in hosts):
        here = Conversation(HERE, [sys.executable, "-c", BOOTSTRAP], connect)
        conversations.insert(0, here)
    question = _question(directory, ports, environ)
    with contextlib.ExitStack() as stack:
        for each in conversations:
            stack.callback(each.close)
        stack.callback(_let_end, conversations)
        _ask(conversations, lambda each: {**question, "nonce": each.nonce})
        facts = {each.name: _facts(each, options) for each in _answered(conversations)}
        if HERE in facts and _is_twice(facts[HERE], facts):
            facts.pop(HERE)
            conversations = [each for each in conversations if each.name != HERE]
        peers = _peers(_answered(conversations), facts)
        _ask(_answered(conversations), lambda each: {
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
    """The probe on one host: a process, and the last answer or the failure."""

    def __init__(self, name: str, command: Sequence[str], connect_seconds: float) -> None:
        self.name = name
        self.nonce = secrets.token_hex(16)
        self.answer: dict[str, Any] = {}
        self.failure = ""
        self.deadline = 0.0
        self.waits = False  # for an answer
        self.process: subprocess.Popen[bytes] | None = None
        self._command = command
        self._login_seconds = connect_seconds * LOGIN_FACTOR  # ssh itself gives up before
        self._runs = False  # Python has started
        self._unread = b""
        self._said: list[str] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process that leads to the probe."""
        with interrupt_waits():
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C comes to us alone
                preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509 - one system call
            )  # fmt: skip
        self.deadline = time.monotonic() + self._login_seconds
        return self.process

    def ask(self, question: Mapping[str, Any]) -> None:
        """Send a question. It fits into the pipe, so this does not wait for the reader."""
        assert self.process is not None and self.process.stdin is not None
        self.waits = True
        if self._runs:
            self.deadline = time.monotonic() + ANSWER_SECONDS
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()

    def hear(self, data: bytes) -> None:
        """Take what the probe has printed, and perhaps the shell before it."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if not text.startswith(MARK):
                self.note(line)
            elif not self._runs:
                self._runs = True
                self.deadline = time.monotonic() + ANSWER_SECONDS
            else:
                self.answer = json.loads(text[len(MARK) :])
                self.waits = False

    def note(self, data: bytes) -> None:
        """Keep what was said for the diagnosis."""
        if len(self._said) < FIRST_LINES:
            self._said += data.decode(errors="replace").splitlines()

    def end(self) -> None:
        """Conclude from the end of the process why there is no answer."""
        assert self.process is not None
        try:
            code: int | None = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        assert self.process.stderr is not None
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(self.process.stderr.fileno(), False)
            self.note(self.process.stderr.read() or b"")
        self._fail(explain_agent(self.name, "\n".join(self._said), code))

    def give_up(self) -> None:
        """Conclude that the time is over."""
        seconds = ANSWER_SECONDS if self._runs else self._login_seconds
        self._fail(explain_silence(self.name, seconds, runs=self._runs))

    def _fail(self, sentence: str) -> None:
        self.failure = sentence
        self.waits = False

    def close(self) -> None:
        """Leave no process and no open file behind."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _ask(
    conversations: Sequence[Conversation], question: Callable[[Conversation], dict[str, Any]]
) -> None:
    """Send each probe its question, and wait until each has answered or failed."""
    waiting = deque(conversations)
    asked: list[Conversation] = []
    with selectors.DefaultSelector() as selector:
        while waiting or any(each.waits for each in asked):
            while waiting and sum(each.waits for each in asked) < MOST_AT_ONCE:
                each = waiting.popleft()
                process = each.process or each.start()
                for pipe in (process.stdout, process.stderr):
                    assert pipe is not None
                    selector.register(pipe, selectors.EVENT_READ, each)
                each.ask(question(each))
                asked.append(each)
            _wait(selector, asked)


def _wait(selector: selectors.BaseSelector, asked: Sequence[Conversation]) -> None:
    due = min((each.deadline for each in asked if each.waits), default=0.0)
    for key, _ in selector.select(max(0.0, due - time.monotonic())):
        each: Conversation = key.data
        assert each.process is not None
        data = os.read(key.fd, 1 << 16)
        hears = key.fileobj is each.process.stdout
        if data:
            (each.hear if hears else each.note)(data)
        else:
            selector.unregister(key.fileobj)
            if hears and each.waits:
                each.end()
    now = time.monotonic()
    for each in asked:
        if each.waits and now >= each.deadline:
            each.give_up()


def _answered(conversations: Sequence[Conversation]) -> list[Conversation]:
    return [each for each in conversations if not each.failure]


def _facts(conversation: Conversation, options: LaunchOptions) -> Facts:
    return Facts.from_answer(conversation.answer).only(options.network_interfaces)


def _is_twice(one: Facts, facts: Mapping[str, Facts]) -> bool:
    return sum(each.identity == one.identity for each in facts.values()) > 1


def _let_end(conversations: Sequence[Conversation]) -> None:
    """Let the probes find the end of their input, and give those that answered a moment."""
    deadline = time.monotonic() + END_SECONDS
    for each in conversations:
        if each.process is not None and each.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                each.process.stdin.close()
    for each in _answered(conversations):
        if each.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, deadline - time.monotonic()))


def _command(host: Host, options: LaunchOptions, environ: Mapping[str, str]) -> list[str]:
    command = [sys.executable, "-c", BOOTSTRAP]
    if not host.remote:
        return command
    return ssh_command(host.name, f"exec {shlex.join(command)}", options, environ.get("PATH"))


def _question(directory: str, ports: Sequence[int], environ: Mapping[str, str]) -> dict[str, Any]:
    package = Path(hvdlite.__file__).parent
    return {
        "program": Path(__file__).with_name("probe.py").read_text(encoding="utf-8"),
        "interfaces": (package / INTERFACES).read_text(encoding="utf-8"),
        "path": agent_path(environ).split(os.pathsep),
        "packages": list(PACKAGES),
        "directory": directory,
        "cores_script": print_cores_script(),
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
