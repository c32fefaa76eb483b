"""A Chromium without a window, driven by WebDriver's requests."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
needs_browser = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="there is no browser: Debian has it in chromium and chromium-driver",
)


class Browser:
    """One window."""

    def __init__(self, driver: str, profile: Path) -> None:
        self._place = f"{driver}/session"
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._post("", {"capabilities": {"alwaysMatch": wanted}})
        self._place += f"/{session['sessionId']}"

    def _post(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        request = urllib.request.Request(
            self._place + path, json.dumps(body).encode(), method=method
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self._post("/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a script in the page returns; where that is a promise, what comes of it."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, condition: str, seconds: float = 20.0) -> Any:
        """Return an expression of the page as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {condition}")):
            assert time.monotonic() < end, (condition, self.run("return document.body.innerText"))
            time.sleep(0.02)
        return value

    def press(self, *keys: str) -> None:
        """Press keys, by their numbers in WebDriver, such as "\\ue007" for Enter."""
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def resize(self, width: int, height: int) -> None:
        """Give the page another size."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": sizes}
        self._post("/goog/cdp/execute", command)

    def prefer(self, scheme: str) -> None:
        """Let the reader prefer ``"dark"`` or ``"light"``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [feature]}}
        self._post("/goog/cdp/execute", command)

    def complaints(self) -> list[str]:
        """Return what the browser has complained of since the last call."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._post("", {}, "DELETE")


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser, and end it."""
    command = ["chromedriver", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if "started successfully" in line)
            found = Browser(f"http://127.0.0.1:{line.split()[-1].rstrip('.')}", folder / "profile")
            try:
                yield found
            finally:
                found.close()
        finally:
            process.terminate()
