"""The file of a `Model`: what ``python -m hvdlite.bench model`` writes, and rank 0 reads.

{"format": 1, "seconds": {"message": 0.00015, "byte": 8.7e-10, ...}, "measured": {...}}
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.collectives.between_hosts.costs import Model

FORMAT = 1
AUTO, DEFAULT = "auto", "default"
VARIABLE = "HVDLITE_NETWORK_MODEL"
REMEDY = "measure it again with hvdlite-run python -m hvdlite.bench model, or set it to default"

log = logging.getLogger("hvdlite")


def usual_path() -> Path:
    """Return where the file lies unless the user names another place."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "hvdlite" / "network_model.json"


def chosen_model(setting: str) -> Model:
    """Return the model that the setting names.

    Raises `ConfigError` where the user has named a file that is none. The file at the usual place
    is passed over with a warning if it is damaged.
    """
    if setting.lower() == DEFAULT:
        return Model()
    if setting.lower() != AUTO:
        return load(Path(setting))
    try:
        path = usual_path()
        return load(path) if path.exists() else Model()
    except (ConfigError, OSError, RuntimeError) as error:  # RuntimeError: there is no home.
        log.warning("the network model is passed over: %s", error)
        return Model()


def load(path: Path) -> Model:
    """Return the model in a file. Raises `ConfigError` naming the file, the figure and a remedy."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{VARIABLE}={path}: {error.strerror}; {REMEDY}") from None
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}={path}: it is no JSON ({error}); {REMEDY}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f'{VARIABLE}={path}: it has no "format": {FORMAT}; {REMEDY}')
    seconds = content.get("seconds")
    if not isinstance(seconds, dict) or seconds.keys() != set(Model.names()):
        raise ConfigError(
            f'{VARIABLE}={path}: "seconds" must have {", ".join(Model.names())}; {REMEDY}'
        )
    for name, value in seconds.items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ConfigError(
                f'{VARIABLE}={path}: "{name}" is {value!r}, and must be seconds of at least 0; '
                f"{REMEDY}"
            )
    return Model(**{name: float(value) for name, value in seconds.items()})


def save(path: Path, model: Model, measured: Mapping[str, Any]) -> None:
    """Write the model, and what is known of its measurement. Raises `OSError`."""
    content = {
        "format": FORMAT,
        "seconds": dict(zip(Model.names(), model.values, strict=True)),
        "measured": measured,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)
