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
from typing import Any, TypeVar

from hvdlite.common.elastic.run import run_until
from hvdlite.common.elastic.variables import VariablesState
from hvdlite.common.gradients.variables import inside_scalers
from hvdlite.keras.callbacks.elastic import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from hvdlite.keras.framework import LEGACY, attach_state, keras, tools
from hvdlite.keras.gradient_exchange import Exchange
from hvdlite.keras.optimizer_families import parts_of
from hvdlite.keras.subclass import Distributed, exchange_of
from hvdlite.keras.variables import (
    all_optimizer_variables,
    build_optimizer_for,
    model_variables,
    without,
)

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Return `func` as elastic training runs it: ``func(state, *args, **kwargs)``.

    After a change of the job's ranks the function is called again, with the state that all of them
    share. What it returns is returned, and errors of the script are raised.
    """
    return run_until(func, tools().is_loss)


class KerasState(VariablesState):
    """The state of training with Keras: the weights of a model, its optimizer, plain objects.

    `optimizer` is ``model.optimizer`` by default; its variables are made if they are not there yet.
    Each further keyword, such as ``epoch=0``, becomes an attribute that is saved, restored and
    synced, too. Raises `ValueError` for a model that is not built, and for an optimizer of
    ``shard_state=True``, of which each rank would lose its part.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                f"the model {model.name} is not built, so it has no weights to save: call "
                "model.build(input_shape), or the model with some data, before"
            )
        # The values of what each rank has of its own, as saved last.
        self._saved_own: list[Any] = []
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if self.optimizer is not None:
            build_optimizer_for(self.optimizer, model)
            if not all(each.state_is_common for each in self._exchanges()):
                raise ValueError(
                    "shard_state=True: each rank has a part of the optimizer's state, which would "
                    "be lost with it: leave shard_state out"
                )
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        attach_state(self.model)
        # Gradients that Keras adds up were reduced before, and so are the same on all ranks.
        optimizer = [] if self.optimizer is None else all_optimizer_variables(self.optimizer)
        # That of Keras 2 is no variable of the optimizer; it may be a number, or a schedule. Keras
        # 3 asks a schedule for its rate, by the number of a step that may have failed and lost it.
        rate = getattr(self.optimizer, "learning_rate", None) if LEGACY else None
        rates = [rate] if hasattr(rate, "assign") else []
        return without([*model_variables(self.model), *optimizer, *rates], [])

    def _own_variables(self) -> Sequence[Any]:
        """Return what ranks keep for themselves, seeds of dropout, and can lose: with JAX.

        There a step gets the memory of the state before, also one that fails.
        """
        if keras.backend.backend() != "jax":
            return []
        return without(self.model.non_trainable_variables, self._variables())

    def _exchanges(self) -> list[Exchange]:
        parts = parts_of(self.optimizer)
        return [exchange_of(part) for part in parts if isinstance(part, Distributed)]

    def _save_variables(self) -> None:
        super()._save_variables()
        self._saved_own = self._values(self._own_variables())

    def restore(self) -> None:
        """Go back to the last save; see `VariablesState`."""
        self._assign(self._own_variables(), self._saved_own)
        super().restore()

    def _enter_world(self) -> None:
        forget = getattr(tools(), "forget_programs", None)
        if forget is not None:
            forget()
        super()._enter_world()

    def _forget_passes(self) -> None:
        for exchange in self._exchanges():
            exchange.forget_passes()

    def _compressing(self) -> Any:
        return inside_scalers(self.optimizer)

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
