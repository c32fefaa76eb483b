"""Collectives as programs have them: described, and checked, when a program is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from hvdlite.common.api.call_checks import check_call, members_of
from hvdlite.common.api.options import CallOptions
from hvdlite.common.base.lists import split_rows
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.gradients.background_exchange import BackgroundExchange
from hvdlite.common.requests.messages import OF_PROGRAM
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.tensors.adapter import HOST_DEVICE, TensorSpec


class Kind(NamedTuple):
    """The dtype and the shape of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """The size of its elements together."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """A collective as a traced program has it: what is the same each time that it runs."""

    collective: str
    options: CallOptions
    name: str | None = None  # None: that of its place in the program.
    names: tuple[str, ...] = ()  # of gradients that are reduced each under its own name
    exchange: BackgroundExchange | None = None  # of gradients that are compressed

    @property
    def is_signal(self) -> bool:
        """Whether it has no tensor: a barrier or a join."""
        return SPECS[self.collective].run is None

    @property
    def keeps_shape(self) -> bool:
        """Whether each result has the shape of an input, and takes its memory."""
        return not self.is_signal and SPECS[self.collective].scalars

    @property
    def is_linear(self) -> bool:
        """Whether the results of a sum of inputs are the sums of their results."""
        reduces = SPECS[self.collective].reduces
        summing = self.options.reduce_op in (ReduceOp.SUM, ReduceOp.AVERAGE)
        return self.exchange is None and (summing or not reduces)

    def derived(self, suffix: str) -> Call:
        """Return the same collective under a name that is made of this one's."""
        name = None if self.name is None else f"{self.name}.{suffix}"
        return replace(self, name=name, names=tuple(f"{each}.{suffix}" for each in self.names))

    def placed(self, program: str, number: int) -> Call:
        """Return the same collective under a name of its place in a program.

        The name is that of the same place in any program, whatever collective is there, and ranks
        compare what they have: those that run different programs learn it, and which ones, instead
        of waiting. One tensor is a group, so that it meets those of larger groups.
        """
        name = f"program.{number}"
        grouped = not (self.is_signal or SPECS[self.collective].splits)
        options = self.options._replace(
            settings=f"{OF_PROGRAM}{program}", by_place=True, grouped=grouped
        )
        return replace(self, name=name if grouped else f"{name}_1of1", options=options)

    def check(self, inputs: Sequence[Kind]) -> None:
        """Raise `ValueError` for what no other rank could make right."""
        runtime, options = for_collective(), self.options
        members = members_of(runtime, self.collective, options.process_set)
        if options.splits is not None:
            raise ValueError(
                f"{self.collective}: a compiled program cannot have splits, as the rows that come "
                "from other ranks are not known when it is compiled: call it outside of jax.jit, "
                "or without splits"
            )
        for kind in inputs:
            if not kind.shape and not (self.is_signal or SPECS[self.collective].scalars):
                raise ValueError(
                    f"{self.collective} {self.name or 'in a program'}: an array without dimensions "
                    "has no rows: give it one, as x[None]"
                )
            spec = TensorSpec(kind.dtype.name, kind.shape, HOST_DEVICE)
            check_call(self.collective, self.name or "in a program", spec, options, members)

    def results(self, inputs: Sequence[Kind]) -> list[Kind]:
        """Return the shapes and dtypes of the results, where all ranks give as many rows.

        Raises `ValueError` for a tensor that this collective cannot take, and before `init`.
        """
        if self.is_signal:
            return [Kind((), np.dtype(np.int32))]
        if self.keeps_shape:
            return [*inputs]
        runtime, spec = for_collective(), SPECS[self.collective]
        members = members_of(runtime, self.collective, self.options.process_set)
        found = []
        for kind in inputs:
            rows = kind.shape[0]
            if spec.splits and rows % len(members):
                raise ValueError(
                    f"{self.collective}: {rows} rows cannot be divided evenly among "
                    f"{len(members)} ranks"
                )
            if spec.scatters:
                rows = split_rows(rows, len(members))[members.index(runtime.rank)]
            elif not spec.splits:
                rows *= len(members)
            found.append(Kind((rows, *kind.shape[1:]), kind.dtype))
        return found
