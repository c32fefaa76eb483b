"""News of hosts, handed from the driver's connection to the states that elastic training uses."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from hvdlite.common.base.host_update import HostUpdateResult
from hvdlite.common.runtime import worlds


class Listener(Protocol):
    """What wants to hear of hosts, such as a `State`."""

    def on_hosts_updated(self, timestamp: int, update_res: HostUpdateResult) -> None:
        """Take the news; called in another thread."""


class NotificationManager:
    """Tells its listeners when hosts have come or gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # Guards the listeners.
        self._listeners: list[Listener] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._listeners)} listeners>"

    def init(self, *address: Any, **more_address: Any) -> None:
        """Begin to listen. The address that Horovod gives is not needed: a connection is there."""
        worlds.on_hosts_seen(self.handle_hosts_updated)

    def register_listener(self, listener: Listener) -> None:
        """Tell `listener` from now on."""
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Stop to tell `listener`, which must have been registered."""
        with self._lock:
            self._listeners = [other for other in self._listeners if other is not listener]

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Tell all listeners. A later change has a larger `timestamp`."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, HostUpdateResult(update_res))


notification_manager = NotificationManager()
WorkerNotificationManager = NotificationManager  # As users of Horovod import it.
