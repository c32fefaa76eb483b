"""What is read of environment variables, and how messages say where it is from."""

from __future__ import annotations

from collections.abc import Mapping

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.meeting.launch import Launch


def first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first of `names` that is set, or an empty name."""
    return next((name for name in names if environ.get(name, "").strip()), "")


def first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first of `names` that holds a number, or an empty name."""
    return next((name for name in names if environ.get(name, "").isdecimal()), "")


def launch_with(environ: Mapping[str, str], source: str, rank: str, size: str) -> Launch:
    """Return a launch with the rank and size of these variables. Raises `ConfigError`."""
    numbers = _number(environ, rank), _number(environ, size)
    evidence = spell(environ, rank, size)
    if numbers[0] >= numbers[1]:
        raise ConfigError(f"{' and '.join(evidence)}: there is no such rank")
    return Launch(source, *numbers, evidence=evidence)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r}: must be a whole number")
    return int(text)


def spell(environ: Mapping[str, str], *names: str) -> tuple[str, ...]:
    """Return variables with their values, as a user would set them."""
    return tuple(f"{name}={environ[name]}" for name in names)
