"""Looks at the host that it runs on, for the launcher: versions, cores, and what it can reach.

The launcher sends the text of this file to a Python there, so it needs nothing but the standard
library, and must run on old Pythons, too: that they are too old, or have no hvdlite, is one of its
findings. It reads one JSON object per line from standard input, a question, and prints one per
answer:

    question    what to look at               {"path": [...], "packages": [...], ...}
    answer      the facts, and a port         {"python": "3.11.7", "port": 40123, ...}
    question    addresses of other hosts      {"peers": [[address, port, nonce], ...]}
    answer      what came of each connection  {"attempts": [[address, error], ...]}

Until its input ends, each connection to the port is answered by the nonce that the launcher has
given to this host: who knows the nonce has reached this host, and not another one that has the same
address, as hosts have on docker0.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import socket
import sys
import threading
from typing import Any

# Stands before each answer, since a shell may print something when it starts.
MARK = "hvdlite-probe "
OTHER_HOST = "another host answers there"
BOOT_FILE = "/proc/sys/kernel/random/boot_id"
NETWORK_FILE = "/proc/self/ns/net"
LONGEST_NONCE = 64


def main(question: dict[str, Any]) -> None:
    """Answer the first question, and one more, then wait for the end of the input."""
    sys.stdout.write(MARK + "{}\n")  # Python runs: whatever takes long now is not ssh
    sys.stdout.flush()
    listener = _listen(question["ports"])
    port = listener.getsockname()[1]
    _in_background(_serve, listener, question["nonce"])
    _write({**look(question), "port": port})
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)  # the launcher has gone
    question = json.loads(line)
    _write({"attempts": try_all(question["peers"], question["seconds"])})
    sys.stdin.readline()


def look(question: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of this host."""
    sys.path[:] = question["path"] + [path for path in sys.path if path]
    return {
        "hostname": socket.gethostname(),
        "identity": [_text_of(BOOT_FILE), _inode_of(NETWORK_FILE)],
        "python": platform.python_version(),
        "executable": sys.executable,
        "directory": os.path.isdir(question["directory"]),
        "cores": _count_cores(),
        "packages": _versions(question["packages"]),
        "addresses": _addresses(),
        **_hvdlite(),
    }


def _hvdlite() -> dict[str, Any]:
    """Return version and protocol of hvdlite, or why it cannot be used."""
    try:
        messages = importlib.import_module("hvdlite.common.requests.messages")
        version = importlib.import_module("hvdlite").__version__
        return {"hvdlite": version, "protocol": messages.PROTOCOL_VERSION}
    except Exception as error:
        return {"hvdlite_error": "%s: %s" % (type(error).__name__, error)}  # noqa: UP031


def _versions(packages: list[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = importlib.import_module("importlib.metadata").version(name)
        except Exception:
            continue
    return {name: version for name, version in found.items() if version}  # None: a broken one


def _addresses() -> list[list[Any]]:
    """Return [interface, address, bits of the subnet] of each that other hosts may connect to."""
    try:
        interfaces = importlib.import_module("hvdlite.common.base.networks")
        found = interfaces.list_interfaces()
    except Exception:  # No hvdlite, or an old Python: it can have no ranks.
        return []
    return [
        [each.name, each.address, each.prefix]
        for each in found
        if each.up and not each.loopback and not each.scope
    ]


def _count_cores() -> int:
    """Return how many cores a rank may use."""
    try:
        cores: int = importlib.import_module("hvdlite.launcher.hosts.resources").cores()
        return cores
    except Exception:
        return os.cpu_count() or 1


def _listen(ports: list[int]) -> socket.socket:
    """Return a socket that listens on one of these ports, for IPv6, too, where there is any."""
    for port in ports:
        for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
            try:
                listener = socket.socket(family)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                listener.bind((address, port))
                listener.listen(128)
                return listener
            except OSError:
                continue
    listener = socket.socket()
    listener.listen(1)  # any port
    return listener


def _serve(listener: socket.socket, nonce: str) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.sendall(nonce.encode())
            except OSError:
                continue


def try_all(peers: list[list[Any]], seconds: float) -> list[list[str]]:
    """Return [address, error] of each peer, in their order; no error: it is the right host."""
    results: list[list[str]] = [[peer[0], ""] for peer in peers]

    def attempt(at: int) -> None:
        address, port, nonce = peers[at]
        try:
            with socket.create_connection((address, port), timeout=seconds) as connection:
                got = connection.recv(LONGEST_NONCE).decode(errors="replace")
            results[at][1] = "" if got == nonce else OTHER_HOST
        except OSError as error:
            results[at][1] = error.strerror or str(error)

    threads = [_in_background(attempt, at) for at in range(len(peers))]
    for thread in threads:
        thread.join()
    return results


def _in_background(function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.write(MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()


def _text_of(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _inode_of(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
