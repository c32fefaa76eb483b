"""The names that users of Horovod import from `horovod.runner.elastic.worker`."""

from __future__ import annotations

from hvdlite.common.base.host_update import HostUpdateResult
from hvdlite.common.elastic.notification import NotificationManager as WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
