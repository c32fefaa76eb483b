"""The libraries that this process can use: hvdlite's own, and those of vendors' plug-ins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.devices.interface import DeviceLibrary

log = logging.getLogger("hvdlite")

ENTRY_POINTS = "hvdlite.devices"
AUTO, OFF = "auto", "off"
Provider = Callable[[], DeviceLibrary | None]


class _Registered(NamedTuple):
    provider: Provider
    by_name_only: bool


_registered: dict[str, _Registered] = {}


def register(name: str, provider: Provider, *, by_name_only: bool = False) -> None:
    """Let `provider` return the library of this name, or None where it cannot be used.

    Packages of frameworks call it when they are imported. A framework that is not the first one
    with the library puts its own name behind it: "nccl:tensorflow". With `by_name_only` the library
    is used where the setting has its name, and not by itself.
    """
    _registered[name] = _Registered(provider, by_name_only)


@cache
def installed_plug_ins() -> tuple[EntryPoint, ...]:
    """Return the entry points of plug-ins; they are read once."""
    return tuple(entry_points(group=ENTRY_POINTS))


def find_libraries(wanted: str) -> list[DeviceLibrary]:
    """Return the libraries for the value of HVDLITE_DEVICES, plug-ins first.

    Raises `ConfigError` where it names one that does not exist or cannot be used.
    """
    if wanted == OFF:
        return []
    plug_ins = {point.name: point for point in installed_plug_ins()}
    if wanted != AUTO:
        return _named(wanted, plug_ins)
    found = [_load(point) for point in plug_ins.values()]
    found += [each.provider() for each in _registered.values() if not each.by_name_only]
    return [library for library in found if library is not None]


def _named(wanted: str, plug_ins: dict[str, EntryPoint]) -> list[DeviceLibrary]:
    names_of_it = [name for name in _registered if wanted in (name, name.partition(":")[0])]
    if wanted in plug_ins:
        made = [plug_ins[wanted].load()()]
    elif names_of_it:
        made = [*map(_made, names_of_it)]
    else:
        names = ", ".join(sorted((AUTO, OFF, *plug_ins, *_registered)))
        raise ConfigError(
            f"HVDLITE_DEVICES={wanted}: there is no such library here; these are: {names}. Those "
            "of a framework are there once hvdlite's package for it is imported"
        )
    found = [library for library in made if library is not None]
    if not found:
        raise ConfigError(f"HVDLITE_DEVICES={wanted}: this library finds no device that it can use")
    return found


def _made(name: str) -> DeviceLibrary | None:
    try:
        return _registered[name].provider()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"HVDLITE_DEVICES={name}: {error}") from error


def _load(point: EntryPoint) -> DeviceLibrary | None:
    """Return the library of a plug-in. One that fails is named in the log, and left out."""
    try:
        library: DeviceLibrary | None = point.load()()
    except Exception as error:
        log.warning(
            "the device library %r (%s) cannot be used: %s: %s. Its tensors go through host "
            "memory; uninstall it, or set HVDLITE_DEVICES=off",
            point.name, point.value, type(error).__name__, error,
        )  # fmt: skip
        return None
    return library
