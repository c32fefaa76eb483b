"""Elastic training with Keras: go on when ranks are lost, and let new ones join.

@hvd.elastic.run
def train(state):
    model.fit(data, epochs=epochs - state.epoch, callbacks=[
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
    ])

train(hvd.elastic.KerasState(model, epoch=0, batch=0))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

from hvdlite.common.elastic.run import is_loss, run_until
from hvdlite.common.elastic.variables import VariablesState
from hvdlite.keras.callbacks.elastic import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from hvdlite.keras.framework import keras
from hvdlite.keras.subclass import Distributed
from hvdlite.keras.variables import (
    build_optimizer_for,
    model_variables,
    optimizer_variables,
    without,
)

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Return `func` as elastic training runs it: ``func(state, *args, **kwargs)``.

    After a change of the job's ranks the function is called again, with the state that all of them
    share. What it returns is returned, and errors of the script are raised.
    """
    if keras.backend.backend() != "tensorflow":
        return run_until(func, is_loss)
    is_loss_here = import_module("hvdlite.tf.errors").is_loss_in_tensorflow
    return run_until(func, is_loss_here)


class KerasState(VariablesState):
    """The state of training with Keras: the weights of a model, its optimizer, plain objects.

    `optimizer` is ``model.optimizer`` by default; its variables are made if they are not there yet.
    Each further keyword, such as ``epoch=0``, becomes an attribute that is saved, restored and
    synced, too. Raises `ValueError` for a model that is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                f"the model {model.name} is not built, so it has no weights to save: call "
                "model.build(input_shape), or the model with some data, before"
            )
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if self.optimizer is not None:
            build_optimizer_for(self.optimizer, model)
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        optimizer = [] if self.optimizer is None else optimizer_variables(self.optimizer)
        # That of Keras 2 is no variable of the optimizer; it may be a number, or a schedule.
        rate = getattr(self.optimizer, "learning_rate", None)
        rates = [rate] if hasattr(rate, "assign") else []
        return without([*model_variables(self.model), *optimizer, *rates], [])

    def _compressing(self) -> Any:
        return self.optimizer if isinstance(self.optimizer, Distributed) else None

    def _variables_to_compare(self) -> Sequence[Any]:
        own = without(model_variables(self.model), self.model.trainable_variables)
        return without(self._variables(), own)  # Ranks have moving averages of their own.


class TensorFlowKerasState(KerasState):
    """`KerasState` under the name, and with the arguments, of Horovod's TensorFlow package.

    `backend` has no effect.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        self.backend = backend
        super().__init__(model, optimizer, **kwargs)


__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
