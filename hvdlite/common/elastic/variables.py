"""States of variables: those of Keras, of any backend, and of TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite.common.api.objects import broadcast_object
from hvdlite.common.elastic.arrays import broadcast_arrays, copied
from hvdlite.common.elastic.source import check_same_tensors, sync_source
from hvdlite.common.elastic.state import ObjectState
from hvdlite.common.runtime.basics import rank
from hvdlite.common.tensors.comparison import Compared, name_on_all_ranks, of_array


class VariablesState(ObjectState):
    """The base of states with variables; a subclass says which, in `_variables`.

    All keywords are plain objects as in `ObjectState`.
    """

    def __init__(self, **kwargs: Any) -> None:
        # The saved values, in the order of the variables.
        self._saved_values: list[np.ndarray[Any, Any]] = []
        self._saved_compression: dict[str, Any] = {}
        super().__init__(broadcast_object, rank, **kwargs)
        self._save_variables()

    def _variables(self) -> Sequence[Any]:
        """Return the variables, which come in the same order on all ranks."""
        raise NotImplementedError

    def _compressing(self) -> Any:
        """Return the optimizer with what compression has not sent; None where there is none."""
        return None

    def _values(self, variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        return [np.asarray(variable.numpy()) for variable in variables]

    def _assign(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def save(self) -> None:
        """Copy the values of the variables and of the attributes to host memory."""
        self._save_variables()
        super().save()

    def _save_variables(self) -> None:
        kept = self._saved_values
        values = self._values(self._variables())
        self._saved_values = [
            copied(value, kept[index] if index < len(kept) else None)
            for index, value in enumerate(values)
        ]
        optimizer = self._compressing()
        self._saved_compression = {} if optimizer is None else optimizer.compression_state()

    def restore(self) -> None:
        """Go back to the last save, with what compression of gradients had not sent then.

        The passes of a step begin anew, so that all ranks that go on have made as many of them.
        Variables that were made since begin with zeros.
        """
        variables = self._variables()
        saved = [value.copy() for value in self._saved_values]
        saved += map(np.zeros_like, self._values(variables[len(saved) :]))
        self._assign(variables, saved)
        if self._saved_compression:
            self._compressing().load_compression_state(self._saved_compression)
        self._forget_passes()
        super().restore()

    def _enter_world(self) -> None:
        super()._enter_world()
        self._forget_passes()

    def _forget_passes(self) -> None:
        """Begin the backward passes of a step anew; do nothing where one of them makes a step."""

    def sync(self) -> None:
        """Make all ranks equal to the root: its variables as they are, objects as saved last.

        A variable whose shape may change, as that of ``shape=[None]``, takes the root's. Raises
        `ValueError` where ranks have other variables.
        """
        source = sync_source()
        if source.takes_part:
            variables = self._variables()
            values = self._values(variables)
            named = zip(_names_of(variables), variables, values, strict=True)
            kinds = {
                name: f"{value.dtype.name} of shape "
                f"{variable.shape if _may_change_shape(variable) else value.shape}"
                for name, variable, value in named
            }
            check_same_tensors(kinds, "variables", source)
            if any(map(_may_change_shape, variables)):
                shapes = self._from_source([value.shape for value in values])
                if rank() != source.root_rank:
                    values = [
                        np.empty(shape, value.dtype)
                        for shape, value in zip(shapes, values, strict=True)
                    ]
            received = broadcast_arrays(values, "elastic.variables", source)
            if rank() != source.root_rank:
                self._assign(variables, received)
        super().sync()
        self._save_variables()

    def _variables_to_compare(self) -> Sequence[Any]:
        """Return the variables that are equal on all ranks, bit by bit."""
        return self._variables()

    def _tensors_to_compare(self) -> Iterator[Compared]:
        variables = self._variables_to_compare()
        for name, value in zip(_names_of(variables), self._values(variables), strict=True):
            yield of_array(name, value)


def _names_of(variables: Sequence[Any]) -> list[str]:
    paths = [getattr(each, "path", each.name) for each in variables]
    return [f"{name_on_all_ranks(path)} ({index})" for index, path in enumerate(paths)]


def _may_change_shape(variable: Any) -> bool:
    """Return whether values of more than one shape may be assigned, as TensorFlow allows it."""
    is_defined = getattr(variable.shape, "is_fully_defined", lambda: True)
    return not is_defined()
