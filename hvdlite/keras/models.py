"""`load_model`: a saved model whose optimizer is distributed again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.common.plain.compression import Compressor, NoneCompressor
from hvdlite.keras.framework import keras
from hvdlite.keras.optimizer import DistributedOptimizer
from hvdlite.keras.optimizer_families import parts_of
from hvdlite.keras.subclass import Distributed


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = NoneCompressor,
    legacy_opts: bool = False,
) -> Any:
    """Load a model that was saved with ``model.save()``, ready to go on training on all ranks.

    Its optimizer gets the state that was saved with it, and is distributed; with `compression`,
    and otherwise as `DistributedOptimizer` makes it. A model that was saved without an optimizer
    has none.

    - `filepath`: in any format that Keras loads; every rank reads it.
    - `custom_optimizers`: classes of optimizers that are not part of Keras.
    - `custom_objects`: other classes and functions that the model was made with, by name.

    `legacy_opts` has no effect: optimizers of all kinds are wrapped. Raises as Keras does for what
    it cannot load.
    """
    classes = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**classes, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not any(
        isinstance(part, Distributed) for part in parts_of(optimizer)
    ):
        DistributedOptimizer(optimizer, compression=compression)
    return model


__all__ = ["load_model"]
