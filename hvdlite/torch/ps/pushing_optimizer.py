"""The optimizer of a worker: its step pushes gradients, and pulls what servers make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvdlite.common.plain.handles import Handle
from hvdlite.ps import context
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.table import SKIP
from hvdlite.ps.worker.remote_rows import RemoteRows
from hvdlite.ps.worker.remote_table import RemoteTable
from hvdlite.ps.worker.shard import PsRolledBack
from hvdlite.ps.worker.table_shards import TableShards
from hvdlite.torch.ps.arrays import Target, flat_array_of
from hvdlite.torch.ps.backward import BackwardFollower
from hvdlite.torch.ps.embedding import ROWS, PulledRows
from hvdlite.torch.ps.gradients import Gradients
from hvdlite.torch.ps.parameters import specs_of
from hvdlite.torch.ps.reduced import ReducedParameters
from hvdlite.torch.ps.updater import numbers_of

TABLE = "optimizer"


class PushingMixin(torch.optim.Optimizer):
    """The mixin that comes before the class of the wrapped optimizer, in workers."""

    # A GradScaler then calls `step` after an overflow, too, and leaves it to unscale.
    _step_supports_amp_scaling = True
    _rest: ReducedParameters | None = None  # The parameters that go by allreduce.

    def _set_up(
        self, names: Mapping[torch.Tensor, str], options: TableOptions, passes: int
    ) -> None:
        chosen = [
            (parameter, number)
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter in names
        ]
        self._list = [parameter for parameter, _ in chosen if not hasattr(parameter, ROWS)]
        self._rows: list[tuple[PulledRows, RemoteRows, int]] = []
        self._targets: list[Target] = []
        self._gradients = Gradients(self._list)
        self._numbers: Sequence[Mapping[str, Any]] = []
        self._table: RemoteTable | None = None
        self._follower: BackwardFollower | None = None
        if self._list:
            specs = specs_of(self, names)
            self._table = context.worker().declare(TABLE, specs, options, self._values)
            self._follower = BackwardFollower(self._list, self._table, passes)
            self._table.on_load = self._pull
        for parameter, number in chosen:
            if rows := getattr(parameter, ROWS, None):
                table = rows.declare(names[parameter], number, options)
                self._rows.append((rows, table, number))
        self._tables: list[TableShards] = [table for _, table, _ in self._rows]
        if self._table is not None:
            self._tables.append(self._table)
        for each in self._tables:
            each.peers = [other for other in self._tables if other is not each]
            each.align(self.finished_steps)
        self._pull()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients, and pull the weights that the next step needs.

        With a `closure`, it is called once before. Raises `PsRolledBack` where the servers have
        lost steps, and `HorovodInternalError` where one is lost for good.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._push_and_pull()
        except PsRolledBack:
            self._tables[0].forget_rollback()
            raise
        return loss

    def _push_and_pull(self) -> None:
        body: dict[str, Any] = {}
        skips = self._overflow()
        if skips:
            body[SKIP] = True
        else:
            numbers = [numbers_of(group) for group in self.param_groups]
            if numbers != self._numbers:
                body["numbers"] = self._numbers = numbers
        if self._follower is not None:
            self._follower.end_step()
        if self._table is not None:
            self._table.push([] if skips else self._gradients.arrays(self._scale), body)
        handles = [self._push_rows(*each, body) for each in self._rows]
        if self._rest is not None and skips:
            self._rest.synchronize()
        elif self._rest is not None:  # While the servers make their steps.
            self._rest.step(self, self._scale)
        self._pull()
        for handle in handles:
            handle.wait()

    def _push_rows(
        self, rows: PulledRows, table: RemoteRows, number: int, body: Mapping[str, Any]
    ) -> Handle:
        ids, gradients = rows.take(self._scale)
        if SKIP in body:
            return table.skip()
        numbers = {"numbers": [body["numbers"][number]]} if "numbers" in body else {}
        return table.push(ids, gradients, numbers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, those of rows as well."""
        super().zero_grad(set_to_none)
        for rows, _, _ in self._rows:
            rows.forget()

    step.hooked = True  # type: ignore[attr-defined]  # The hooks are those of the server's step.

    def _overflow(self) -> bool:
        """Return whether a loss scaler has found an overflow, on any rank where these reduce."""
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            return False
        return bool(found_inf.item()) if self._rest is None else self._rest.agree(found_inf)

    @property
    def _scale(self) -> torch.Tensor | None:
        """What gradients are to be divided by: a GradScaler sets it for the time of a step."""
        return getattr(self, "grad_scale", None)

    def synchronize(self) -> None:
        """Wait for the gradients that go by allreduce; those for servers stay this worker's own."""
        if self._rest is not None:
            self._rest.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Let `step` find gradients that `synchronize` has reduced, and that may have changed."""
        return nullcontext() if self._rest is None else self._rest.skip_synchronize()

    @property
    def finished_steps(self) -> int:
        """The number of steps that this worker has finished; not 0 for one that has returned."""
        return min(table.clock for table in self._tables)

    def _values(self) -> list[Array]:
        return [flat_array_of(parameter) for parameter in self._list]

    @torch.no_grad()
    def _pull(self) -> None:
        if self._table is None:
            return
        if not self._targets or not all(target.holds() for target in self._targets):
            self._targets = [Target(parameter) for parameter in self._list]
        self._table.pull([target.array for target in self._targets])
        Target.finish(self._targets)
