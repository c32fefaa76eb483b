"""The page of a job: what it shows, to whom, and the file that is left of it.

Who asks must know the token in the address, and must not be a page of another origin: neither by a
request of its own, nor by a name that it lets stand for this host (DNS rebinding). What is served
loads nothing, and runs no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import re
import secrets
import socket
from importlib import resources

from hvdlite.common.connections.http_server import Content, Request
from hvdlite.launcher.live.history import History
from hvdlite.launcher.live.job_view import JobView
from hvdlite.launcher.live.snapshot import Snapshot, snapshot

NO_DATA = '<script type="application/json" id="data">null</script>'
TITLE = "<title>hvdlite</title>"
DATA_PATH = re.compile(r"/data/(\d{0,9})")
SAME_SITE = (None, "same-origin", "none")
FORBIDDEN = "403 Forbidden"


class LivePage:
    """The page of one job, which is served at `address`, by which it may be asked for."""

    def __init__(self, title: str, address: str = "") -> None:
        self.token = secrets.token_urlsafe(24)
        self.asked = 0  # How often somebody has asked for the job.
        self._title = title
        self._names = {"localhost", socket.gethostname().lower(), address.lower()} - {""}
        self._history = History()
        self._now = snapshot(JobView(), 0.0, 0.0)
        self._ended: str | None = None
        self._html = resources.files(__package__).joinpath("page.html").read_text("utf-8")
        policy = _policy(self._html)
        self._html = self._html.replace(
            TITLE, f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{TITLE}'
        )
        self._headers = (
            ("Content-Security-Policy", f"{policy}; frame-ancestors 'none'"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
        )

    def look(self, now: Snapshot) -> None:
        """Take what the job does now."""
        self._now = now
        self._history.add(now)

    def end(self, sentence: str) -> None:
        """Take note that the job has ended; `sentence` says why, and is empty where all is well."""
        self._ended = sentence

    def find(self, request: Request) -> Content | None:
        """Answer a request; None without the token."""
        token, _, rest = request.path[1:].partition("/")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return None
        data = DATA_PATH.fullmatch(f"/{rest}")
        if rest and not data:
            return None
        refusal = _refusal(request, self._names, navigates=not data)
        if refusal:
            return Content("text/plain; charset=utf-8", f"{refusal}\n".encode(), FORBIDDEN)
        if data:
            self.asked += 1
            text = self._data(*([int(data[1])] if data[1] else []))
            return Content("application/json", text.encode(), headers=self._headers)
        return Content("text/html; charset=utf-8", self._html.encode(), headers=self._headers)

    def report(self) -> str:
        """Return the page with all that was kept of the job, which needs no server."""
        # No text can end the element.
        data = self._data(*self._history.ranks).replace("<", "\\u003c")
        return self._html.replace(NO_DATA, NO_DATA.replace("null", data))

    def _data(self, *ranks: int) -> str:
        job = {"title": self._title, "ended": self._ended, "history": self._history.as_dict(*ranks)}
        return json.dumps({**self._now, **job}, separators=(",", ":"), allow_nan=False)


def _policy(html: str) -> str:
    """Return the content security policy under which the page runs its own script and style."""
    hashes = []
    for element in ("script", "style"):
        (text,) = re.findall(rf"<{element}>(.*?)</{element}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes.append(f"{element}-src 'sha256-{digest}'")
    return (
        f"default-src 'none'; {'; '.join(hashes)}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )


def _refusal(request: Request, names: set[str], navigates: bool) -> str:
    """Return why the request must come from another origin; empty where it does not."""
    host = request.header("host") or ""
    if not _is_of_this_host(host, names):
        return "open the page by the address that hvdlite-run has printed, or an IP address"
    origin, site = request.header("origin"), request.header("sec-fetch-site")
    follows_a_link = navigates and (
        request.header("sec-fetch-mode") == "navigate"
        and request.header("sec-fetch-dest") == "document"
    )
    if origin not in (None, f"http://{host}") or not (site in SAME_SITE or follows_a_link):
        return "pages of other origins may not read this one"
    return ""


def _is_of_this_host(host: str, names: set[str]) -> bool:
    """Return whether no stranger's name server can have named this host so."""
    name = re.sub(r":\d{0,5}$", "", host).removeprefix("[").removesuffix("]").lower()
    if name in names:
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False
