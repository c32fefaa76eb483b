"""The YAML file of --config-file: settings by the keys that horovodrun uses."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.settings.config import closest, settings
from hvdlite.common.settings.setting import Setting, boolean

# Keys of horovodrun that have no meaning here, and what to use instead.
IGNORED_KEYS = {
    "controller": "use --gloo, --mpi or --launcher",
    "params.hierarchical_allgather": "use params.data_plane",
    "params.torus_allreduce": "use params.allreduce",
    "library_options.num_nccl_streams": "there is one stream per rank",
    "library_options.gloo_timeout_seconds": "use stall_check.shutdown_time_seconds",
    "logging.hide_timestamp": "use logging.with_timestamp",
}
MERGE = "<<"  # The key of a section whose keys are added.
NOTHING = ("", "~", "null", "Null", "NULL")


def read_config_file(path: str, notes: list[str]) -> dict[str, str]:
    """Read the values of settings by name; warnings for the user are appended to `notes`.

    Raises `ConfigError` naming the file and the key for an unknown key or a bad value.
    """
    by_key = {entry.yaml: entry for entry in settings() if entry.yaml}
    values: dict[str, str] = {}
    for key, value in _flatten(_load(path), "", by_key):
        source = f"{path}: {key}"
        if key in by_key:
            entry = by_key[key]
            if entry.name in values:  # in its section, and by its dotted name
                raise ConfigError(f"{source}={value!r}: this key is there twice: leave one out")
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


def _load(path: str) -> dict[str, Any]:
    import yaml  # only this flag needs it

    try:
        # The base loader guesses no types.
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        tree = None if root is None else _tree(root, f"--config-file: {path}", frozenset())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config-file: cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"--config-file: {path} is not YAML: {why}") from None
    except RecursionError:
        raise ConfigError(
            f"--config-file: {path} is nested too deeply: it must be sections of keys"
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"--config-file: {path}: the whole file is {tree!r}: it must be sections of keys, "
            "such as timeline: {filename: t.json}"
        )
    return tree


def _tree(node: Any, source: str, around: frozenset[int]) -> Any:
    """Return sections, lists and texts as they are written, where YAML would make 1.1 of 1.10.

    What is empty is None. `around` has the nodes that `node` is in, as an alias (``*a``) may bring
    one of them again.
    """
    if id(node) in around:
        line = node.start_mark.line + 1
        raise ConfigError(
            f"{source}, line {line}: this part contains itself: write its keys in place of a *name"
        )
    if node.id == "scalar":
        return None if node.style is None and node.value in NOTHING else node.value
    around |= {id(node)}
    if node.id == "sequence":
        return [_tree(part, source, around) for part in node.value]
    merged: dict[str, Any] = {}
    own: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(_tree(key, source, around)), key.start_mark.line + 1
        part = _tree(value, source, around)
        if name == MERGE and isinstance(part, dict):
            merged |= part
        elif name in own:
            raise ConfigError(
                f"{source}: {name} is there twice, in line {lines[name]} and in line {line}: "
                "leave one out"
            )
        else:
            own[name], lines[name] = part, line
    return merged | own


def _flatten(node: Any, prefix: str, keys: Container[str]) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; an empty section says nothing. Below one of `keys` is none."""
    if not isinstance(node, dict) or prefix in keys:
        yield prefix, node
        return
    for key, value in node.items():
        if value is not None:
            yield from _flatten(value, f"{prefix}.{key}" if prefix else key, keys)


def _variable_text(entry: Setting, value: Any, source: str) -> str:
    several = isinstance(entry.default, tuple)
    if isinstance(value, dict) or (isinstance(value, list) and not several):
        kind = "a list" if isinstance(value, list) else "a section of keys"
        raise ConfigError(f"{source}={value!r}: must be one value, and is {kind}")
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    if entry.parse is boolean:
        return str(int(entry.read(text, source) != entry.yaml_inverted))
    if text.lower() in ("true", "false"):
        raise ConfigError(f"{source}={text!r}: cannot be true or false")
    return entry.variable_text(text, source)
