"""The YAML file of --config-file: settings by the keys that horovodrun uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.settings.config import closest, settings
from hvdlite.common.settings.setting import Setting, boolean, name_or_off

# Keys of horovodrun that have no meaning here, and what to use instead.
IGNORED_KEYS = {
    "controller": "use --gloo, --mpi or --launcher",
    "params.hierarchical_allgather": "use params.data_plane",
    "params.torus_allreduce": "use params.allreduce",
    "library_options.num_nccl_streams": "there is one stream per rank",
    "library_options.gloo_timeout_seconds": "use stall_check.shutdown_time_seconds",
    "logging.hide_timestamp": "use logging.with_timestamp",
}


def read_config_file(path: str, notes: list[str]) -> dict[str, str]:
    """Read the values of settings by name; warnings for the user are appended to `notes`.

    Raises `ConfigError` naming the file and the key for an unknown key or a bad value.
    """
    by_key = {entry.yaml: entry for entry in settings() if entry.yaml}
    values: dict[str, str] = {}
    for key, value in _flatten(_load(path), ""):
        source = f"{path}: {key}"
        if key in by_key:
            entry = by_key[key]
            values[entry.name] = _variable_text(entry, value, source)
        elif key in IGNORED_KEYS:
            if (key, value) != ("controller", "mpi"):
                why = IGNORED_KEYS[key]
                notes.append(f"{source}={value!r} has no meaning here, and is ignored: {why}")
        elif any(known.startswith(f"{key}.") for known in (*by_key, *IGNORED_KEYS)):
            raise ConfigError(f"{source}={value!r}: {key} must be a section of keys")
        else:
            known = ", ".join(sorted(by_key))
            meant = closest(key, by_key)
            raise ConfigError(f"{path}: unknown key {key}{meant or f'; the keys are {known}'}")
    return values


def _load(path: str) -> Any:
    import yaml  # only this flag needs it

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config-file: cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"--config-file: {path} is not YAML: {why}") from None


def _flatten(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; an empty section says nothing."""
    if not isinstance(node, dict):
        yield prefix or "(the whole file)", node
        return
    for key, value in node.items():
        if value is not None:
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))


def _variable_text(entry: Setting, value: Any, source: str) -> str:
    switch = entry.parse is boolean
    if value is False and entry.parse is name_or_off:
        value = "off"
    if isinstance(value, bool) != switch:
        wanted = (
            "must be true or false"
            if switch
            else "cannot be true or false: put quotes around yes, no, on or off where it is a name"
        )
        raise ConfigError(f"{source}={value!r}: {wanted}")
    if switch:
        return str(int(value != entry.yaml_inverted))
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return entry.variable_text(text, source)
