"""The log of hvdlite: standard error, with the level and form of the settings."""

from __future__ import annotations

import logging

from hvdlite.common.settings.config import Config

log = logging.getLogger("hvdlite")


class _Form(logging.Formatter):
    """The form that the settings give to lines."""

    level = logging.NOTSET  # That they have given last.


def set_up_log(config: Config) -> None:
    """Set the level and the form of the lines, where the script has not done so itself.

    Its formatters stay, and so does its level unless the settings name one.
    """
    if log.level == _Form.level or "log_level" in config.given:
        _Form.level = {"trace": logging.DEBUG, "fatal": logging.CRITICAL}.get(
            config.log_level, logging.getLevelName(config.log_level.upper())
        )
        log.setLevel(_Form.level)
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.propagate = False
    time_ = "" if config.log_hide_time else "%(asctime)s "
    for handler in log.handlers:
        if handler.formatter is None or isinstance(handler.formatter, _Form):
            handler.setFormatter(_Form(f"{time_}hvdlite %(levelname)s: %(message)s"))
