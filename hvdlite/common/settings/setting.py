"""What a setting is: where its field is read from, and the parsers of values."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.segmentation.parsing import read_strategy

PREFIX = "HVDLITE_"
ALIAS_PREFIX = "HOROVOD_"
MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """Where a `Config` field is read from, and what it accepts."""

    name: str  # the field of Config
    default: Any
    env: str  # without the prefix
    parse: Callable[[str], Any]  # text -> value; ValueError says what is accepted
    help: str
    flag: str | None = None  # of hvdlite-run; None: environment only
    no_flag: str | None = None  # the flag that turns a boolean off
    yaml: str | None = None  # dotted key in the config file
    yaml_inverted: bool = False  # the key says true where the variable says 0
    flag_scale: int = 1  # a flag's (and a YAML key's) unit, in units of the variable
    alias: bool = True  # HOROVOD_<env> is honoured

    @property
    def has_default(self) -> bool:
        """Whether there is a value to tell of where nobody gives one."""
        return self.default not in ("", ())

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.env

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that set it, the one that wins first."""
        return (self.variable, ALIAS_PREFIX + self.env) if self.alias else (self.variable,)

    def read(self, text: str, source: str) -> Any:
        """Parse `text`, which came from `source`; raises `ConfigError` naming the source."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{source}={text!r}: {error}") from None

    def variable_text(self, text: str, source: str) -> str:
        """Return the value of the variable for the flag or YAML key `source` with the value `text`.

        Raises `ConfigError` naming the source.
        """
        try:
            scaled = text if self.flag_scale == 1 else _scale(text, self.flag_scale)
            self.parse(scaled)
        except ValueError as error:
            raise ConfigError(f"{source}={text!r}: {error}") from None
        return scaled


def _scale(text: str, scale: int) -> str:
    try:
        return str(round(float(text) * scale))
    except (OverflowError, ValueError):
        raise ValueError("must be a number") from None


def boolean(text: str) -> bool:
    """0/1 (any integer, as Horovod), true/false, yes/no, on/off."""
    lowered = text.strip().lower()
    if lowered in ("true", "yes", "on"):
        return True
    if lowered in ("false", "no", "off", ""):
        return False
    try:
        return int(lowered) > 0
    except ValueError:
        raise ValueError("must be 0 or 1 (or true, false, yes, no, on, off)") from None


def number(
    kind: type, minimum: float, unit: str, maximum: float = math.inf
) -> Callable[[str], Any]:
    """Make a parser of an int or float of at least `minimum`, at most `maximum`, in `unit`."""
    what = "a whole number" if kind is int else "a number"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"must be {what} ({unit})") from None
        # Beyond all floats: inf, and integers that math cannot take.
        if not minimum <= value <= min(maximum, sys.float_info.max):
            most = "" if math.isinf(maximum) else f" and at most {maximum:g}"
            raise ValueError(f"must be {what} of at least {minimum:g}{most} ({unit})")
        return value

    return parse


def choice(*values: str) -> Callable[[str], str]:
    """Make a parser of one of `values`, in any case."""

    def parse(text: str) -> str:
        lowered = text.strip().lower()
        if lowered not in values:
            raise ValueError("must be one of " + ", ".join(values))
        return lowered

    return parse


def core_list(text: str) -> tuple[int, ...]:
    """Comma-separated core numbers, one for each local rank."""
    try:
        cores = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        cores = (-1,)
    if not cores or any(core < 0 for core in cores):
        raise ValueError("must be a comma-separated list of core numbers, such as 0,1,2,3")
    return cores


def name_list(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError("must be a comma-separated list, and names nothing")
    return names


def port_range(text: str) -> tuple[int, int]:
    """Port range, such as 12000-12100, or one port."""
    first, dash, last = text.partition("-")
    try:
        ports = int(first), int(last if dash else first)
    except ValueError:
        ports = (0, 0)
    if not 0 < ports[0] <= ports[1] < 1 << 16:
        raise ValueError("must be a range of ports from 1 to 65535, such as 12000-12100")
    return ports


def segmentation(text: str) -> str:
    """Check the spelling of a segmentation strategy."""
    read_strategy(text)
    return text


def trace_path(text: str) -> str:
    """Check the path of an iteration trace, whose suffix names its format."""
    if not text.endswith((".csv", ".parquet")):
        raise ValueError("must be a file name that ends with .csv or .parquet")
    return text


def output_file(path: str) -> str:
    """Return the absolute path of a file to write, behind symbolic links; it need not exist yet.

    Raises `ValueError` where one sees already that it cannot be written, and for a device or pipe,
    which a file would replace, or which blocks its writer.
    """
    real = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "a device or a pipe"
        raise ValueError(f"must be a regular file, and is {kind}: name another file")
    folder = os.path.dirname(real)
    if os.path.islink(real) or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"must be a file in a folder that can be written: make {folder}, or name another file"
        )
    return real


def check_output_file(path: str) -> None:
    """Raise as `output_file` for one that is written later; one that is there may be read alone."""
    if path and not os.path.isfile(path):
        output_file(path)


def setting(default: Any, env: str, parse: Callable[[str], Any], help: str, **where: Any) -> Any:
    """Make a dataclass field that carries its `Setting`."""
    return field(default=default, metadata={"setting": (env, parse, help, where)})
