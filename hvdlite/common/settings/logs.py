"""The log of hvdlite: standard error, with the level and form of the settings."""

from __future__ import annotations

import logging

from hvdlite.common.settings.config import Config

log = logging.getLogger("hvdlite")


def set_up_log(config: Config) -> None:
    """Set the level and the form of the lines."""
    level = {"trace": logging.DEBUG, "fatal": logging.CRITICAL}.get(
        config.log_level, logging.getLevelName(config.log_level.upper())
    )
    log.setLevel(level)
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.propagate = False
    time_ = "" if config.log_hide_time else "%(asctime)s "
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter(f"{time_}hvdlite %(levelname)s: %(message)s"))
