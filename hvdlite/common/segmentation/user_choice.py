"""What a user has chosen for the gradients of one process set, by calls."""

from __future__ import annotations

from hvdlite.common.segmentation.strategies import Index, Size, Strategy, Threshold


class Choice:
    """The choices for one process set, until its gradients travel for the first time."""

    def __init__(self) -> None:
        self._by_size: Size | None = None
        self._by_index: Index | None = None
        self._fused: dict[str, Strategy] = {}  # by collective
        self._travelled = False

    def set_split(self, strategy: Size | Index) -> str:
        """Cut gradients by `strategy`; what the user should be warned of, or ''.

        Raises `ValueError` when gradients have travelled.
        """
        self._check()
        by_size = isinstance(strategy, Size)
        before: Strategy | None = self._by_size if by_size else self._by_index
        if isinstance(strategy, Size):
            self._by_size = strategy
        else:
            self._by_index = strategy
        if before is not None:
            return f"{strategy.text} takes the place of {before.text}, which was set before"
        if self._by_size is not None and self._by_index is not None:
            return f"{self._by_size.text} wins over {self._by_index.text}: both are set"
        return ""

    def set_fusion(self, strategies: dict[str, Strategy]) -> None:
        """Fuse collectives by `strategies`. Raises `ValueError` as `set_split`."""
        if "allreduce" in strategies:
            self._check()
        self._fused.update(strategies)

    def _check(self) -> None:
        if self._travelled:
            raise ValueError(
                "gradients of this process set have been reduced already: set how they are split "
                "after init() and before the first of them is reduced"
            )

    def strategy(self) -> Strategy | None:
        """How gradients are cut from now on; None where nothing was chosen."""
        self._travelled = True
        return self._by_size or self._by_index or self._fused.get("allreduce")

    def limit_bytes(self, collective: str) -> int | None:
        """Most bytes of a segment of allgather or reducescatter; None: as the job is set."""
        fused = self._fused.get(collective) if collective != "allreduce" else None
        return fused.bytes if isinstance(fused, Threshold) else None
