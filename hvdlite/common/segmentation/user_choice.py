"""The segmentation that the user has chosen by calls for one process set."""

from __future__ import annotations

from hvdlite.common.segmentation.strategies import Index, Size, Strategy, Threshold


class UserChoice:
    """The choices for one process set; they are final once its gradients are reduced."""

    def __init__(self) -> None:
        self._by_size: Size | None = None
        self._by_index: Index | None = None
        self._fused: Strategy | None = None  # of gradients
        self._limits: dict[str, Strategy] = {}  # of other collectives, by name
        self._final = False  # set when the first gradients ask how they are split

    def set_split(self, strategy: Size | Index) -> str:
        """Split gradients by `strategy`; return a warning for the user, or an empty string.

        Raises `ValueError` when gradients have already been reduced.
        """
        self._check()
        by_size = isinstance(strategy, Size)
        previous: Strategy | None = self._by_size if by_size else self._by_index
        if isinstance(strategy, Size):
            self._by_size = strategy
        else:
            self._by_index = strategy
        if previous is not None:
            return f"{strategy.spec} takes the place of {previous.spec}, which was set before"
        if self._by_size is not None and self._by_index is not None:
            return f"{self._by_size.spec} wins over {self._by_index.spec}: both are set"
        return ""

    def set_fusion(self, gradients: Strategy | None, others: dict[str, Strategy]) -> None:
        """Fuse gradients by a strategy, and other collectives by theirs; raise as `set_split`.

        None leaves the choice for gradients as it is.
        """
        if gradients is not None:
            self._check()
            self._fused = gradients
        self._limits.update(others)

    def _check(self) -> None:
        if self._final:
            raise ValueError(
                "gradients of this process set have been reduced already: set how they are split "
                "after init() and before the first of them is reduced"
            )

    def strategy(self) -> Strategy | None:
        """Return the final strategy of the gradients; None where the user has chosen none."""
        self._final = True
        return self._by_size or self._by_index or self._fused

    def limit_bytes(self, collective: str) -> int | None:
        """Return the most bytes of a segment of `collective`; None: the job's setting applies.

        Gradients have no limit: `strategy` plans their segments.
        """
        fused = self._limits.get(collective)
        return fused.bytes if isinstance(fused, Threshold) else None
