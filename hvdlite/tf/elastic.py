"""Elastic training with TensorFlow: go on when ranks are lost, and let new ones join.

@hvd.elastic.run
def train(state):
    while state.step < steps:
        train_step(...)
        state.step += 1
        state.commit()

variables = model.variables + optimizer.variables
train(hvd.elastic.TensorFlowState(variables, optimizer=optimizer, step=0))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tensorflow as tf

from hvdlite.common.elastic.run import run_until
from hvdlite.common.elastic.variables import VariablesState
from hvdlite.common.gradients.variables import inside_scalers
from hvdlite.missing_names import module_getattr
from hvdlite.tf.errors import is_loss_in_tensorflow

if TYPE_CHECKING:  # which would take every name for one that is there
    from hvdlite.keras.elastic import TensorFlowKerasState
else:  # Keras is not imported before.
    __getattr__ = module_getattr(
        __name__, TensorFlowKerasState="hvdlite.keras.elastic:TensorFlowKerasState"
    )

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Return `func` as elastic training runs it: ``func(state, *args, **kwargs)``.

    After a change of the job's ranks the function is called again, with the state that all of them
    share. What it returns is returned, and errors of the script are raised. Errors of TensorFlow
    are those of the script unless this rank's world is over.
    """
    return run_until(func, is_loss_in_tensorflow)


class TensorFlowState(VariablesState):
    """The state of training with TensorFlow: variables and plain objects.

    `variables` are those of TensorFlow or Keras; all global variables of the graph by default.
    With a `session`, or while a graph is built in the default one, values are read and set there.
    What a distributed `optimizer` has not sent of compressed gradients belongs to the state, too,
    and it begins the passes of a step anew where the state is restored or the world is another.
    Each further keyword becomes an attribute that is saved, restored and synced, too.

    The constructor does not communicate; `sync` broadcasts each time. Raises `ValueError` without
    variables when executing eagerly, where there are no global ones.
    """

    def __init__(
        self,
        variables: Iterable[Any] | None = None,
        session: Any = None,
        *,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if variables is None and tf.executing_eagerly():
            raise ValueError(
                "TensorFlowState does not know its variables: when executing eagerly there are no "
                "global ones, so give model.variables, and those of the optimizer"
            )
        if variables is None:
            variables = tf.compat.v1.global_variables()
        self.variables = list(variables)
        self.session = session
        self.optimizer = optimizer
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        return self.variables

    def _compressing(self) -> Any:
        return inside_scalers(self.optimizer)

    def _forget_passes(self) -> None:
        optimizer = inside_scalers(self.optimizer, "forget_passes")
        if optimizer is not None:
            session = self._session()
            with nullcontext() if session is None else session.as_default():
                optimizer.forget_passes()

    def _values(self, variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        session = self._session()
        if session is None:
            return super()._values(variables)
        return [np.asarray(value) for value in session.run(list(variables))]

    def _assign(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        session = self._session()
        if session is None:
            super()._assign(variables, values)
            return
        for variable, value in zip(variables, values, strict=True):
            variable.load(value, session)

    def _session(self) -> Any:
        if self.session is not None or tf.executing_eagerly():
            return self.session
        return tf.compat.v1.get_default_session()


__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]
