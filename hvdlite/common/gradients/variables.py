"""Variables and other sources of gradients: their identity, and names equal on all ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from hvdlite.common.tensors.comparison import name_on_all_ranks


def inside_scalers(optimizer: Any, method: str = "compression_state") -> Any:
    """Return the distributed optimizer: this one, or that inside of loss scalers; None without.

    It has the method of this name.
    """
    while optimizer is not None and not hasattr(optimizer, method):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer


def is_overwritten(variable: Any) -> bool:
    """Return whether Keras puts the gradient of this variable in its place: in 8-bit training.

    So it is with scales and recent magnitudes. The largest of several gradients is the one that
    suits all.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


class Sources:
    """The sources of one framework, whose variables are of one type."""

    def __init__(self, variable_type: type) -> None:
        self._variable_type = variable_type

    def plain(self, source: Any) -> Any:
        """Return the framework's variable of a variable of Keras 3; other sources as they are."""
        value = getattr(source, "value", None)
        return value if isinstance(value, self._variable_type) else source

    def is_variable(self, source: Any) -> bool:
        """Return whether it is a variable, of the framework or of Keras."""
        return isinstance(self.plain(source), self._variable_type)

    def key_of(self, source: Any) -> int:
        """Return a key that no other source has as long as this one is alive."""
        return id(self.plain(source))

    def names_of(self, prefix: str, sources: Sequence[Any]) -> list[str]:
        """Return a different name for each source.

        The names are equal on all ranks that give the same sources in the same order.
        """
        return [f"{prefix}.{index}.{name}" for index, name in enumerate(map(self.name_of, sources))]

    def name_of(self, source: Any) -> str:
        """Return what all ranks call a variable, and perhaps others."""
        return name_on_all_ranks(self.path_of(source))

    def path_of(self, source: Any) -> str:
        """Return the name of a variable in its model, which may differ between ranks."""
        if not self.is_variable(source):
            return "tensor"
        path: str = getattr(source, "path", None) or _without_output(source.name)
        return path


@lru_cache(maxsize=10_000)
def _without_output(name: str) -> str:
    return re.sub(r":\d+$", "", name)


class LocalSources:
    """The sources whose gradients stay on this rank."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        # By key. The sources are kept alive, so that no other object gets the id of one.
        self._source_of: dict[int, Any] = {}
        self._layers: list[Any] = []

    def __bool__(self) -> bool:
        """Return whether there are any, or layers that may have some."""
        return bool(self._source_of or self._layers)

    def add(self, source: Any) -> None:
        self._source_of[self._sources.key_of(source)] = self._sources.plain(source)

    def add_layers(self, layers: Any) -> None:
        """Add the weights of one Keras layer or several, those included that are not built yet.

        Raises `ValueError` for anything else.
        """
        layers = list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
        # Those of Keras 3 and 2, where they are imported; else no layer exists.
        imported = [sys.modules[name] for name in ("keras", "tf_keras") if name in sys.modules]
        types = tuple(keras.layers.Layer for keras in imported)
        for layer in layers:
            if not isinstance(layer, types):
                raise ValueError(f"local_layers must be Keras layers, not {type(layer).__name__}")
        self._layers += layers

    def pick(self, sources: Iterable[Any]) -> list[bool]:
        if not self:
            return [False for _ in sources]
        key_of = self._sources.key_of
        weights = (weight for layer in self._layers for weight in layer.trainable_weights)
        local_keys = {key_of(weight) for weight in weights}.union(self._source_of)
        return [key_of(source) in local_keys for source in sources]
