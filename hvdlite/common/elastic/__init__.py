"""Elastic training for every framework: state, and the loop that survives changes of the job.

run_fn runs a function again after each change; a State says what it goes on with. The names here
are those that users of Horovod import from `horovod.common.elastic`.
"""

from __future__ import annotations

from hvdlite.common.elastic.notification import notification_manager
from hvdlite.common.elastic.run import run_fn
from hvdlite.common.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]
