"""What ranks in Spark print, on its way to the driver; without Spark."""

from __future__ import annotations

import contextlib
import io
import socket
import threading

from pytest import MonkeyPatch

from hvdlite.common.connections.address import Address
from hvdlite.common.connections.prove import Challenge
from hvdlite.launcher.agents.call_back import call_back
from hvdlite.spark import output
from hvdlite.spark.output import DriverOutput, RankOutput
from tests.descriptors import no_free_descriptor

SECRET = "0123456789abcdef" * 4


def test_the_driver_prints_what_ranks_write_and_nothing_of_others() -> None:
    out, err = io.StringIO(), io.StringIO()
    driver = DriverOutput(2, SECRET, "127.0.0.1", out, err, False)
    for rank in range(2):
        with contextlib.closing(RankOutput(driver.address, SECRET)) as rank_output:
            for stream, connection in rank_output.streams(rank).items():
                connection.sendall(f"{stream} of {rank}\n".encode())
    with contextlib.suppress(OSError):
        call_back([str(Address(*driver.address))], "another secret", "stdout", 0.0)
    with socket.create_connection(driver.address) as stranger:
        stranger.sendall(f"{SECRET} stdout\n0\nfalse\n".encode())
    driver.close()
    assert sorted(out.getvalue().splitlines()) == [
        f"[{rank}]<stdout>:stdout of {rank}" for rank in range(2)
    ]
    assert sorted(err.getvalue().splitlines()) == [
        f"[{rank}]<stderr>:stderr of {rank}" for rank in range(2)
    ]


def test_output_that_comes_while_no_file_may_be_opened_is_printed_later() -> None:
    out = io.StringIO()
    driver = DriverOutput(1, SECRET, "127.0.0.1", out, None, False)
    with socket.socket() as early:
        with no_free_descriptor():
            early.connect(driver.address)
            driver._thread.join(0.3)
        assert early.recv(1)
    with contextlib.closing(RankOutput(driver.address, SECRET)) as rank_output:
        rank_output.streams(0)["stdout"].sendall(b"late\n")
    driver.close()
    assert out.getvalue() == "[0]<stdout>:late\n"


def test_the_secret_is_on_no_wire() -> None:
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen_in() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(Challenge.new().pack())
                while data := connection.recv(4096):
                    heard.extend(data)
                    connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=listen_in)
        thread.start()
        RankOutput(listener.getsockname()[:2], SECRET).close()
        thread.join()
    assert heard and SECRET.encode() not in heard and bytes.fromhex(SECRET) not in heard


def test_a_rank_that_says_nothing_at_the_end_costs_no_turns(monkeypatch: MonkeyPatch) -> None:
    driver = DriverOutput(1, SECRET, "127.0.0.1", None, None, False)
    turns = []
    run_once = driver._loop.run_once

    def count(timeout: float | None = None) -> bool:
        turns.append(timeout)
        return run_once(timeout)

    monkeypatch.setattr(driver._loop, "run_once", count)
    with contextlib.closing(RankOutput(driver.address, SECRET)) as silent:
        monkeypatch.setattr(output, "CONNECT_SECONDS", 0.2)
        driver.close()
        assert len(turns) < 20
        assert silent.streams(0)["stdout"].recv(1) == b""
