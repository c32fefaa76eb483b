"""hvdlite-run for tests that would wait: it looks for stragglers eight times a second.

Decisions are those of the last 1.25 seconds instead of 6, and it says at each look who is slow. Its
agents, which run this file without arguments, gather as often.
"""

from __future__ import annotations

import sys

from hvdlite.common.iterations import counts
from hvdlite.launcher.agent_process import agent
from hvdlite.launcher.cli import main
from hvdlite.launcher.hosts import ssh
from hvdlite.launcher.live import job_view, live_view, stragglers

LOOK_SECONDS = 0.125
job_view.WINDOW_SECONDS, stragglers.FEWEST_SECONDS = 1.25, 1.0
stragglers.SILENT_SECONDS = 0.0
live_view.LOOK_SECONDS = agent.LOOK_SECONDS = LOOK_SECONDS
counts.PERIOD_SECONDS = LOOK_SECONDS  # Of ranks that import this.
ssh.AGENT_MODULE = "tests.launcher.live.hasty"

if __name__ == "__main__":
    sys.exit(main() if sys.argv[1:] else agent.main([]))
