"""The best model so far, in a file."""

from __future__ import annotations

from typing import Any

from hvdlite.keras.framework import keras


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' ModelCheckpoint with ``save_best_only``, for a file that is named later.

    Set `filepath` before `fit`: with the endings that Keras asks for, ``.weights.h5`` for
    `save_weights_only`, otherwise ``.keras``. It writes on every rank that has the callback; give
    it to one rank only, or one file to each. `monitor`, `verbose`, `mode` and `save_freq` as there.

    `fit` raises `ValueError` when there is no `filepath`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            "later.weights.h5" if save_weights_only else "later.keras",  # Keras looks at the ending
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: str | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that there is a file to write to."""
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint does not know where to save: set its filepath")
        self.filepath = str(self.filepath)
        super().on_train_begin(logs)
