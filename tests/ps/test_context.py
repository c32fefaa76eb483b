"""What processes of a cluster are told when something is wrong with their start."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from hvdlite.common.base.errors import (
    ConfigError,
    HorovodInternalError,
    HorovodVersionMismatchError,
)
from hvdlite.common.connections import prove
from hvdlite.common.connections.address import Address
from hvdlite.common.connections.prove import Challenge, Claim, Party, Software
from hvdlite.common.requests.messages import PROTOCOL_VERSION
from hvdlite.numpy import ps
from hvdlite.ps import context
from hvdlite.ps.cli import main as cli
from hvdlite.ps.cluster.settings import ClusterSettings, address_towards, read_settings
from hvdlite.ps.connections import client as client_module
from hvdlite.ps.connections.channel import MEMBER, Caller, Listener
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.connection import Connection
from hvdlite.ps.connections.messages import SERVER, Message
from hvdlite.ps.server.server import Server
from hvdlite.ps.tables.updater import Added
from hvdlite.ps.worker.server_link import ServerLink
from hvdlite.ps.worker.worker import Worker
from tests.parallel.jobs import environment
from tests.ps.cluster import Loop, NewCluster, train_in_one, wait_until, with_one
from tests.ps.cluster import bits as bits_of
from tests.ps.hostile import begin
from tests.ps.sites import held_port

OWN = {
    "HVDLITE_ROLE": "server", "HVDLITE_SCHEDULER": "node1:4242", "HVDLITE_NUM_SERVERS": "2",
    "HVDLITE_NUM_WORKERS": "4", "HVDLITE_NODE_ID": "s1", "HVDLITE_PS_TOKEN": "secret",
}  # fmt: skip
MINDSPORE = {
    "MS_ROLE": "MS_PSERVER", "MS_SCHED_HOST": "node1", "MS_SCHED_PORT": "4242",
    "MS_SERVER_NUM": "2", "MS_WORKER_NUM": "4", "MS_NODE_ID": "s1",
}  # fmt: skip
PS_LITE = {
    "DMLC_ROLE": "server", "DMLC_PS_ROOT_URI": "node1", "DMLC_PS_ROOT_PORT": "4242",
    "DMLC_NUM_SERVER": "2", "DMLC_NUM_WORKER": "4",
}  # fmt: skip


def test_all_names_mean_the_same() -> None:
    own = read_settings(OWN)
    assert own == ClusterSettings("server", "node1:4242", 2, 4, "s1", b"secret", True)
    assert read_settings({**MINDSPORE, "HVDLITE_PS_TOKEN": "secret"}) == own
    assert read_settings({**PS_LITE, **OWN}) == own
    found = read_settings(PS_LITE)
    assert found is not None and found.scheduler == "node1:4242"


def test_a_process_without_a_role_is_in_no_cluster() -> None:
    assert read_settings({"MS_SCHED_HOST": "node1"}) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"HVDLITE_ROLE": "boss"}, "HVDLITE_ROLE=boss: give scheduler, server or worker"),
        ({"HVDLITE_NUM_SERVERS": "0"}, "HVDLITE_NUM_SERVERS=0: give how many"),
        ({"HVDLITE_NUM_WORKERS": "two"}, "HVDLITE_NUM_WORKERS=two"),
        ({"HVDLITE_NUM_WORKERS": ""}, "HVDLITE_NUM_WORKERS=: give how many"),
        ({"HVDLITE_SCHEDULER": "node1:70000"}, "HVDLITE_SCHEDULER=node1:70000: .* 1 to 65535"),
        ({"HVDLITE_SCHEDULER": ""}, "HVDLITE_SCHEDULER=: give the scheduler's host"),
        ({"HVDLITE_SCHEDULER": "node1"}, "HVDLITE_SCHEDULER=node1: give the scheduler's host"),
        ({"HVDLITE_SCHEDULER": "", "MS_SCHED_HOST": "n", "MS_SCHED_PORT": "0"}, "MS_SCHED_PORT=0"),
        ({"HVDLITE_PS_CURVE": "1"}, "HVDLITE_PS_CURVE is called HVDLITE_PS_TLS now"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings(OWN | changes)


def test_the_address_of_this_host_depends_on_the_way() -> None:
    assert address_towards("127.0.0.1:80") == "127.0.0.1"
    assert address_towards("[::1]:80") == "[::1]"


# -- the start of processes


WORKER = """
import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps import context
context.init()
for call in (hvd.init, hvd.barrier):
    try:
        call()
    except HorovodInternalError as error:
        print(error)
"""


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


def test_a_scheduler_alone_and_workers_without_collectives(port: int) -> None:
    """The worker leaves when its program ends, and the scheduler ends with it."""
    address = f"127.0.0.1:{port}"
    variables = {
        "HVDLITE_SCHEDULER": address, "HVDLITE_NUM_SERVERS": "1", "HVDLITE_NUM_WORKERS": "1",
    }  # fmt: skip
    serve = (
        "from hvdlite.ps import context; context.init()\n"
        "from hvdlite.ps.context import serve; serve()"
    )
    flags = "--address", address, "--servers", "1", "--workers", "1"
    commands: list[tuple[list[str], dict[str, str]]] = [
        (["-m", "hvdlite.ps.cli", "scheduler", *flags], {}),
        (["-c", serve], {**variables, "HVDLITE_ROLE": "server"}),
        (["-c", WORKER], {**variables, "HVDLITE_ROLE": "worker"}),
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, *words], env=environment(**own), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for words, own in commands
    ]  # fmt: skip
    try:
        ends = [process.communicate(timeout=40) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], ends
    assert ends[2][0].count("independent workers have no collectives") == 2


def test_hvdlite_ps_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HVDLITE_NUM_SERVERS", raising=False)
    assert cli(["scheduler", "--address", "127.0.0.1:5000"]) == 2
    said = "hvdlite-ps: HVDLITE_NUM_SERVERS=: give how many there are, 1 or more\n"
    assert capsys.readouterr().err == said


def test_who_has_not_come_is_named(new_cluster: NewCluster) -> None:
    cluster = new_cluster(1, 3, start_seconds=1000.0)
    membership = cluster.state.membership
    wanted = r"workers 1, 2 had not come after 1000 seconds \(--start-timeout\)"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cluster.worker, "first")
        wait_until(lambda: ("worker", 0) in membership.members)
        membership.begin -= 1000.0  # As if they had passed.
        with pytest.raises(HorovodInternalError, match=wanted):
            first.result(30)


# -- two versions of hvdlite in one cluster: they hear of each other at once


OTHER = Software(PROTOCOL_VERSION + 1, "9.9")
SAYS = r"another rank runs 9\.9 \(protocol|9\.9 \(protocol .* is installed here"


@contextmanager
def other_version() -> Iterator[str]:
    """Yield the address of a process of another version, which refuses one claim."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(Challenge(OTHER, prove.new_nonce()).pack())
                connection.recv(prove.PROVEN_CLAIM_BYTES, socket.MSG_WAITALL)
                connection.sendall(prove.refusal(prove.OTHER_PROTOCOL, "it is another version"))
                connection.settimeout(20)
                connection.recv(1)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(20)


def test_a_process_of_another_version_reads_ours_and_is_refused(new_cluster: NewCluster) -> None:
    cluster, trainer = with_one(new_cluster, 1)
    with begin(cluster.settings.scheduler) as stranger:
        data = stranger.recv(prove.CHALLENGE.size, socket.MSG_WAITALL)
        challenge = Challenge.unpack(data)
        assert challenge.software == prove.OURS
        claim = Claim.new(Party(b"", MEMBER, "ps scheduler"), b"worker 9")
        stranger.sendall(prove.prove_claim(b"a secret", challenge, claim._replace(software=OTHER)))
        code, length = prove.REPLY.unpack(stranger.recv(prove.REPLY.size, socket.MSG_WAITALL))
        assert code == prove.OTHER_PROTOCOL
        assert b"runs hvdlite 9.9" in stranger.recv(length, socket.MSG_WAITALL)
    trainer.train(5)
    assert bits_of(trainer.values) == train_in_one(5, lambda _step: [0])


def test_a_worker_of_another_version_than_the_scheduler_is_told(new_cluster: NewCluster) -> None:
    cluster, _ = with_one(new_cluster, 1)
    with other_version() as address, pytest.raises(HorovodVersionMismatchError, match=SAYS):
        Worker(replace(cluster.settings, node_id="a", scheduler=address))


def test_a_refusal_is_heard_however_soon_it_comes(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come before the thread that connects goes on."""

    class Late(Connection):
        def __init__(self, caller: Caller, now: Callable[[], float]) -> None:
            wait_until(lambda: bool(caller.trouble))
            super().__init__(caller, now)

    cluster, _ = with_one(new_cluster, 1)
    monkeypatch.setattr(client_module, "Connection", Late)
    with other_version() as address, pytest.raises(HorovodVersionMismatchError, match=SAYS):
        Worker(replace(cluster.settings, node_id="a", scheduler=address, start_seconds=0.5))


# -- what a worker hears of a server that does not let it in, and of names that it does not know


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client(b"worker 0", b"the right one")
    yield made
    made.close()


def linked(client: Client, address: str) -> ServerLink:
    link = ServerLink(client, 0, lambda: 0)
    client.call(lambda: link.follow(address))
    return link


def asked(client: Client, link: ServerLink) -> Message:
    """Return what a server answers to a request; raise what it refuses with."""
    handle = client.ask(lambda done: link.ask(Message("save"), done))
    assert handle.ended_within(20)
    answer: Message = handle.wait()
    return answer


def test_a_server_of_another_version_is_named(client: Client) -> None:
    """Whether it has refused this process before it is asked, or after that."""
    with other_version() as address:
        link = linked(client, address)
        for _ in range(2):
            with pytest.raises(HorovodVersionMismatchError, match=SAYS):
                asked(client, link)


def test_a_server_with_another_token_is_named(client: Client) -> None:
    def body(ended: Callable[[], bool]) -> None:
        listener = Listener(Address("127.0.0.1"), SERVER, b"another")
        addresses.append(listener.address)
        ready.set()
        Server(listener, lambda _: Added(), incarnation=1, workers=[0]).serve(ended)
        listener.close()

    addresses: list[str] = []
    ready = threading.Event()
    server = Loop(body)
    try:
        assert ready.wait(20)
        with pytest.raises(ConfigError, match="server 0 says: HVDLITE_PS_TOKEN is another one"):
            asked(client, linked(client, addresses[0]))
    finally:
        server.end()


def test_a_name_that_nobody_has_begun_is_named(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(1, 1)
    worker = cluster.worker("worker 0")
    held = context.Context(cluster.settings, worker)
    monkeypatch.setattr(context._Held, "context", held)
    with pytest.raises(HorovodInternalError, match="no worker has begun 'weights': push it"):
        ps.pull("weights")
    ps.push("weights", np.ones(2))
    assert ps.pull("weights").shape == (2,)
