"""What all callbacks share: they take part in `fit` of Keras 3 and of Keras 2."""

from __future__ import annotations

from typing import Any

from hvdlite.keras.framework import keras


class Callback(keras.callbacks.Callback):
    """A callback for models of either Keras, whichever of them its base class is from.

    A script may use the package tf_keras without having set TF_USE_LEGACY_KERAS.
    """

    _supports_tf_logs = True  # Keras 2: logs need not be made numbers for this callback

    def __init__(self) -> None:
        super().__init__()
        self.params: dict[str, Any] | None = None
        self._trained: Any = None

    def set_model(self, model: Any) -> None:
        """Keras says which model is trained."""
        self._trained = model

    @property
    def model(self) -> Any:
        """The model that is trained; None outside `fit`."""
        return self._trained

    @model.setter
    def model(self, model: Any) -> None:
        self._trained = model

    def _implements_train_batch_hooks(self) -> bool:  # what Keras 2 asks for
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False
