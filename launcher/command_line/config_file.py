"""The YAML file of --config-file: settings by the keys that horovodrun uses."""

from __future__ import annotations

from collections.abc import Container, Iterator
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
MERGE = "tag:yaml.org,2002:merge"  # of the key <<


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


def _load(path: str) -> dict[Any, Any]:
    import yaml  # only this flag needs it

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return {}
        _check(root, loader, path, set(), set())
        tree = loader.construct_document(root)
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


def _check(node: Any, loader: Any, path: str, around: set[int], seen: set[int]) -> None:
    """Raise `ConfigError` with the line of what yaml fails at, or takes without a word.

    `around` has the nodes that `node` is in, and `seen` those that are checked: an alias (``*a``)
    can bring one again.
    """
    where = f"--config-file: {path}, line {node.start_mark.line + 1}"
    if id(node) in around:
        raise ConfigError(f"{where}: this part contains itself: write its keys in place of a *name")
    if id(node) in seen:
        return
    seen.add(id(node))
    if node.id == "scalar":
        if node.tag == MERGE:
            return
        try:
            str(loader.construct_object(node))  # yaml and str() fail at numbers of many digits
        except (ArithmeticError, AttributeError, LookupError, ValueError):
            kind = node.tag.rpartition(":")[2]
            raise ConfigError(
                f"{where}: {node.value[:40]!r} cannot be read as the {kind} that YAML takes it "
                "for: correct it, or put it in quotes where it is a text"
            ) from None
        return
    parts = node.value
    if node.id == "mapping":
        _check_keys([key for key, _ in node.value], path)
        parts = [part for pair in node.value for part in pair]
    around.add(id(node))
    for part in parts:
        _check(part, loader, path, around, seen)
    around.remove(id(node))


def _check_keys(keys: list[Any], path: str) -> None:
    lines: dict[str, int] = {}
    for key in keys:
        if key.id != "scalar" or key.tag == MERGE:
            continue  # a key that is a list is unknown anyway; each << adds something
        line = key.start_mark.line + 1
        if key.value in lines:
            raise ConfigError(
                f"--config-file: {path}: {key.value} is there twice, in line {lines[key.value]} "
                f"and in line {line}: leave one out"
            )
        lines[key.value] = line


def _flatten(node: Any, prefix: str, keys: Container[str]) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; an empty section says nothing. Below one of `keys` is none."""
    if not isinstance(node, dict) or prefix in keys:
        yield prefix, node
        return
    for key, value in node.items():
        if value is not None:
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key), keys)


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
    several = isinstance(entry.default, tuple)
    if isinstance(value, dict) or (isinstance(value, list) and not several):
        kind = "a list" if isinstance(value, list) else "a section of keys"
        raise ConfigError(f"{source}={value!r}: must be one value, and is {kind}")
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    found = entry.variable_text(text, source)
    if isinstance(entry.default, str) and not isinstance(value, str):
        # YAML has changed what was written: 1.10 is 1.1 by now, and 007 is 7.
        kind = type(value).__name__
        raise ConfigError(
            f"{source}={text}: must be a text, and YAML reads it as {kind}: put it in quotes"
        )
    return found
