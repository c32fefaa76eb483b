"""Variables, and other sources of gradients: who they are, and names that all ranks have alike."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# Keras numbers layers of the same kind, over all models of a process: dense, dense_1, dense_2.
_AUTOMATIC_NUMBER = re.compile(r"_\d+(?=/|$)")


class Sources:
    """The sources of one framework, whose own variables are of one type."""

    def __init__(self, variable_type: type) -> None:
        self._variable_type = variable_type

    def plain(self, source: Any) -> Any:
        """The framework's variable behind a variable of Keras 3; anything else as it is."""
        value = getattr(source, "value", None)
        return value if isinstance(value, self._variable_type) else source

    def is_variable(self, source: Any) -> bool:
        """Whether it is a variable, of the framework or of Keras."""
        return isinstance(self.plain(source), self._variable_type)

    def key_of(self, source: Any) -> int:
        """What tells it apart from others as long as it lives."""
        return id(self.plain(source))

    def names_of(self, prefix: str, sources: Sequence[Any]) -> list[str]:
        """A name for each source, no two of them the same.

        They are the same on all ranks that give the same sources in the same order.
        """
        return [
            f"{prefix}.{index}.{_AUTOMATIC_NUMBER.sub('', path)}"
            for index, path in enumerate(map(self.path_of, sources))
        ]

    def path_of(self, source: Any) -> str:
        """The name of a variable in its model. It may hold numbers that differ between ranks."""
        if not self.is_variable(source):
            return "tensor"
        path: str = getattr(source, "path", None) or re.sub(r":\d+$", "", source.name)
        return path


class LocalSources:
    """Sources whose gradients are this rank's own business."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._known: dict[int, Any] = {}  # holds what it knows: an id is not used again
        self._layers: list[Any] = []

    def __bool__(self) -> bool:
        """Whether there are any, or layers that may have some."""
        return bool(self._known or self._layers)

    def add(self, source: Any) -> None:
        """A variable, or a tensor."""
        self._known[self._sources.key_of(source)] = self._sources.plain(source)

    def add_layers(self, layers: Any) -> None:
        """The weights of a Keras layer or of several, also those that they do not have yet.

        Raises `ValueError` for anything else.
        """
        layers = list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
        for layer in layers:
            if not isinstance(layer, tuple(_layer_types())):
                raise ValueError(f"local_layers must be Keras layers, not {type(layer).__name__}")
        self._layers += layers

    def pick(self, sources: Iterable[Any]) -> list[bool]:
        """For each of the sources whether it is one of these."""
        key_of = self._sources.key_of
        of_layers = {key_of(each) for layer in self._layers for each in layer.trainable_weights}
        known = of_layers.union(self._known)
        return [key_of(source) in known for source in sources]


def _layer_types() -> Iterator[type]:
    """Those of Keras 2 and 3, as far as they have been imported: without that there is none."""
    for name in ("keras", "tf_keras"):
        if name in sys.modules:
            yield sys.modules[name].layers.Layer
