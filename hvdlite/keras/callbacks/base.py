"""What all callbacks share: they take part in `fit` of Keras 3 and of Keras 2."""

from __future__ import annotations

from typing import Any

from hvdlite import numpy as hvd
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.keras.framework import attach_state, keras


class Callback(keras.callbacks.Callback):
    """A callback for models of either Keras, whichever of them its base class is from.

    A script may use the package tf_keras without having set TF_USE_LEGACY_KERAS. `process_set` are
    the ranks that train one model together; on a rank outside of it nothing is exchanged.
    """

    _supports_tf_logs = True  # Keras 2: logs need not be made numbers for this callback

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.process_set = process_set
        self.params: dict[str, Any] | None = None
        self._trained: Any = None

    def set_model(self, model: Any) -> None:
        """Keras says which model is trained."""
        self._trained = model

    @property
    def model(self) -> Any:
        """The model that is trained, with the values that it has now; None outside `fit`."""
        attach_state(self._trained)
        return self._trained

    @model.setter
    def model(self, model: Any) -> None:
        self._trained = model

    def ranks(self) -> list[int]:
        """Return the global ranks that train this model together, this one included.

        Raises `ValueError` before `init`, and for a set that is not registered.
        """
        rank = hvd.rank()  # raises, and says why: the set would only not be registered
        self.process_set.size()  # raises
        assert self.process_set.ranks is not None
        return self.process_set.ranks if self.process_set.included() else [rank]

    def _implements_train_batch_hooks(self) -> bool:  # what Keras 2 asks for
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False
