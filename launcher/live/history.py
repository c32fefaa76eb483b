"""What the ranks have done since the job began, thinned out so that it never grows large.

At first each look at the job is a point. When there are too many, each two neighbours become one,
their mean, and from then on a point is the mean of twice as many looks. Without I/O and clock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlite.launcher.live.snapshot import Snapshot

Rows = npt.NDArray[np.float32]
# Of each rank, by their names in a snapshot; `share` is that of `waited` in `step`.
FIELDS = ("steps_a_second", "step", "compute", "data", "hidden", "waited", "memory", "share")
STEP, WAITED = FIELDS.index("step"), FIELDS.index("waited")
RANGED = ("memory", "share")  # Of these there are the least and the most of all ranks, too.
OF_JOB = (*FIELDS, *(f"{name}_{end}" for end in ("least", "most") for name in RANGED))
COLUMNS = [FIELDS.index(name) for name in RANGED]
MOST_POINTS, FEWEST_POINTS = 240, 24
MOST_VALUES = 1 << 20  # In the points of all ranks, with fewer points for many ranks.


class History:
    """Points of time: in each the mean, least and most of all ranks, and every rank."""

    def __init__(self) -> None:
        self._columns: dict[int, int] = {}  # By rank.
        self._at: list[float] = []
        self._ranks: list[Rows] = []  # Of each point: ranks, fields.
        self._job: list[Rows] = []
        self._looks_a_point = 1
        # Of the looks that are no point yet: their sum, and how many of them know each value.
        self._looks, self._last = 0, 0.0
        self._sum = np.zeros((0, len(FIELDS)))
        self._count = np.zeros((0, len(FIELDS)), np.int32)

    def add(self, now: Snapshot) -> None:
        """Take what the ranks do now."""
        for rank in now["ranks"]:
            self._columns.setdefault(rank["rank"], len(self._columns))
        if not self._columns:
            return
        rows = np.full((len(self._columns), len(FIELDS)), np.nan)
        for rank in now["ranks"]:
            rows[self._columns[rank["rank"]], :-1] = [rank[name] for name in FIELDS[:-1]]
        with np.errstate(all="ignore"):
            rows[:, -1] = rows[:, WAITED] / rows[:, STEP]
        new = ((0, len(rows) - len(self._sum)), (0, 0))
        known = np.isfinite(rows)
        self._sum = np.pad(self._sum, new) + np.where(known, rows, 0.0)
        self._count = np.pad(self._count, new) + known
        self._looks, self._last = self._looks + 1, now["at"]
        if self._looks >= self._looks_a_point:
            self._keep()

    def _keep(self) -> None:
        rows = _divide(self._sum, self._count)
        self._at.append(self._last)
        self._ranks.append(rows)
        self._job.append(_of_all(rows))
        self._looks = 0
        self._sum[:], self._count[:] = 0.0, 0
        fit = MOST_VALUES // (len(FIELDS) * len(self._columns))
        while len(self._at) >= max(FEWEST_POINTS, min(MOST_POINTS, fit)):
            self._ranks, self._job = _halve(self._ranks), _halve(self._job)
            self._at = self._at[-1::-2][::-1]
            self._looks_a_point *= 2

    def as_dict(self, *ranks: int) -> dict[str, Any]:
        """Return all points: moments, the job and these ranks, with lists by the names of fields.

        What is not known at a moment is None.
        """
        at, each, job = list(self._at), list(self._ranks), list(self._job)
        if self._looks:
            rows = _divide(self._sum, self._count)
            at, each, job = [*at, self._last], [*each, rows], [*job, _of_all(rows)]
        found, unknown = {}, np.full(len(FIELDS), np.nan, np.float32)
        for rank in ranks:
            column = self._columns.get(rank)
            if column is not None:
                of_rank = [rows[column] if column < len(rows) else unknown for rows in each]
                found[str(rank)] = _by_name(FIELDS, of_rank)
        moments = [round(moment, 1) for moment in at]
        return {"at": moments, "job": _by_name(OF_JOB, job), "ranks": found}

    @property
    def ranks(self) -> list[int]:
        """All ranks that there were."""
        return list(self._columns)

    @property
    def nbytes(self) -> int:
        """How much memory the points take."""
        return sum(rows.nbytes for rows in (*self._ranks, *self._job))


def _divide(total: npt.NDArray[np.float64], count: npt.NDArray[np.int32]) -> Rows:
    with np.errstate(all="ignore"):
        return (total / count).astype(np.float32)


def _of_all(rows: Rows) -> Rows:
    known = np.isfinite(rows)
    mean = _divide(np.where(known, rows, 0.0).sum(axis=0), known.sum(axis=0, dtype=np.int32))
    ranged = rows[:, COLUMNS]
    return np.concatenate([mean, np.fmin.reduce(ranged), np.fmax.reduce(ranged)])


def _halve(points: list[Rows]) -> list[Rows]:
    """Return the means of neighbours; the first stays alone where the number is odd."""
    odd = len(points) % 2
    pairs = zip(points[odd::2], points[odd + 1 :: 2], strict=True)
    return [*points[:odd], *(_mean(*pair) for pair in pairs)]


def _mean(one: Rows, other: Rows) -> Rows:
    """Return the mean of two points, the second of which may have more ranks."""
    padded = np.full_like(other, np.nan)
    padded[: len(one)] = one
    with np.errstate(all="ignore"):
        both = (padded + other) / 2
    return np.where(np.isnan(padded), other, np.where(np.isnan(other), padded, both))


def _by_name(names: tuple[str, ...], points: list[Rows]) -> dict[str, list[float | None]]:
    lists = np.array(points).reshape(-1, len(names)).T.tolist()
    return {name: list(map(_short, values)) for name, values in zip(names, lists, strict=True)}


def _short(value: float) -> float | None:
    """Return a value with few digits; None for what JSON has no number for."""
    return float(f"{value:.4g}") if abs(value) < np.inf else None
