"""Variables that have `numpy()` and `assign()`: those of Keras, and of TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite.checkpoint.tensors import Array, Context, Owner, Tensors

# The name of a variable that was given none, as Nadam's product: Keras counts these as well.
_COUNTED = re.compile(r"variable(_\d+)?")


class VariableTensors(Tensors):
    """Variables, and the models and optimizers of Keras that have some."""

    def is_tensor(self, value: Any) -> bool:
        return _is_variable(value) or super().is_tensor(value)

    def kind(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        if super().is_tensor(tensor):
            return super().kind(tensor)
        dtype = getattr(tensor.dtype, "name", tensor.dtype)  # Keras has names, TensorFlow objects.
        return str(dtype), tuple(tensor.shape)

    def array(self, tensor: Any) -> Array:
        return np.asarray(tensor.numpy() if _is_variable(tensor) else tensor)

    def store(self, tensor: Any, values: Array) -> Any:
        """Assign values to a variable, and return it."""
        if not _is_variable(tensor):
            return super().store(tensor, values)
        tensor.assign(values)
        return tensor

    def owner(self, thing: Any, context: Context) -> Owner | None:
        """Return the variables of a model, a layer or an optimizer by their paths within it.

        Raises `ValueError` for one that has not been built: its variables do not exist yet.
        """
        if isinstance(thing, type) or not hasattr(thing, "variables"):
            return None
        if not getattr(thing, "built", True):
            raise ValueError(
                f"the {type(thing).__name__} {getattr(thing, 'name', '')!r} has no variables yet: "
                "call build() before the checkpoint (of an optimizer, with the trainable "
                "variables of its model)"
            )
        # An optimizer whose state is divided is given as one that has all of it.
        holder = self.whole.get(id(thing), thing)
        # The weights of a model are its variables but for seeds, of which ranks keep their own.
        variables = getattr(holder, "weights", holder.variables)
        models = [] if hasattr(thing, "weights") else _names_of_models(context.state)
        attributes = {id(value): name for name, value in getattr(holder, "__dict__", {}).items()}
        tree: dict[str, Any] = {}
        for variable in variables() if callable(variables) else variables:
            # Keras counts models and optimizers of a process, so the next one has another name.
            name = _path(variable).removeprefix(f"{getattr(holder, 'name', '')}/")
            if _COUNTED.fullmatch(name):
                name = attributes.get(id(variable), name)
            for model in models:
                name = name.removeprefix(f"{model}_")  # in the state of an optimizer
            if name in tree:
                raise ValueError(f"two variables have the name {name!r}: rename a layer")
            tree[name] = variable

        def install(_: Any) -> None:
            if holder is not thing:
                thing.adopt(holder)

        return Owner(thing, tree, install)

    def gather_of(self, thing: Any, name: str) -> Callable[[], Any] | None:
        """Return what gathers the state of a Keras optimizer with ``shard_state=True``."""
        settings = getattr(type(thing), "_hvdlite_settings", None)
        if settings is None or not settings.shard_state or not getattr(thing, "built", True):
            return None
        return thing.consolidate if settings.reduction.active else None


def _names_of_models(state: Any) -> list[str]:
    things = state.values() if isinstance(state, dict) else ()
    names = [
        str(each.name) for each in things if hasattr(each, "weights") and hasattr(each, "name")
    ]
    return sorted(names, key=len, reverse=True)


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _is_variable(value: Any) -> bool:
    return hasattr(value, "assign") and hasattr(value, "numpy") and hasattr(value, "shape")
