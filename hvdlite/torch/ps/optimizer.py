"""`ps.DistributedOptimizer`: gradients are pushed to servers, and weights pulled from them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import SparseAdam

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.buckets import check_names, check_passes
from hvdlite.common.plain.handles import Handle
from hvdlite.ps import context
from hvdlite.ps.blocks import Array, TensorSpec
from hvdlite.ps.clocks import Mode
from hvdlite.ps.layout import PART_BYTES
from hvdlite.ps.raw import new_store
from hvdlite.ps.registry import TableOptions
from hvdlite.ps.remote_rows import RemoteRows
from hvdlite.ps.row_store import NORMAL
from hvdlite.ps.server import TableDescription
from hvdlite.ps.serving import serve
from hvdlite.ps.shard import PsRolledBack
from hvdlite.ps.table_shards import TableShards
from hvdlite.ps.tables import SKIP
from hvdlite.ps.worker import RemoteTable
from hvdlite.torch.ps.arrays import Target, flat_array_of
from hvdlite.torch.ps.backward import BackwardFollower
from hvdlite.torch.ps.embedding import ROWS, PulledRows, serve_rows
from hvdlite.torch.ps.gradients import Gradients
from hvdlite.torch.ps.reduced import ReducedParameters
from hvdlite.torch.ps.row_updater import TorchRows
from hvdlite.torch.ps.updater import TorchUpdater, numbers_of
from hvdlite.torch.sharded_state.elementwise import check_elementwise

TABLE = "optimizer"
_REMEDY = (
    "servers step over flat pieces of many parameters, and need an optimizer that treats each "
    "element on its own, as SGD, Adam and AdamW do. Give partition='tensor', which keeps tensors "
    "whole"
)
MARK = "_hvdlite_by_servers"  # An attribute of parameters.


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    mode: str = "sync",
    staleness: int | None = None,
    parameters: Sequence[str] | None = None,
    partition: str = "element",
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    scale: str | None = None,
) -> Any:
    """Return an optimizer of the same class whose steps are made by the servers.

    A server does not return from here: it serves, and its process ends with the job.

    - `named_parameters`: ``model.named_parameters()``, with all parameters of the optimizer.
    - `mode`: "sync": a step is made of the gradients of all workers; "async": of those of one;
      "ssp": the same, and no worker is more than `staleness` + 1 steps ahead of another.
    - `parameters`: names, or patterns as ``"embedding.*"``, of the parameters that go by the
      servers; all others are reduced among the ranks of the job, which makes their steps itself.
      None: those of `set_param_ps`, or all.
    - `partition`: "element": tensors are cut; "tensor": they stay whole, for optimizers that look
      at more than one element at a time.
    - `backward_passes_per_step`: how many gradients add up in the parameters before a step.
    - `op`: of sync: Average or Sum.
    - `scale`: of async and ssp: "1/W" divides each push by the number of workers that take part.

    Raises `ValueError` for arguments that contradict each other.
    """
    chosen = Mode(mode, staleness, scale)
    if partition not in ("element", "tensor"):
        raise ValueError(f"partition is {partition!r}, which is neither 'element' nor 'tensor'")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"op is {op!r}: a server averages gradients or adds them up")
    check_passes(backward_passes_per_step)
    every = _names_of(optimizer, named_parameters)
    names = _chosen(every, parameters)
    served = [hasattr(parameter, ROWS) for parameter in names]
    is_for_rows = isinstance(optimizer, SparseAdam) and all(served)
    if (partition == "element" or any(served)) and not is_for_rows:
        check_elementwise(optimizer, type(optimizer), _REMEDY)
    if any(cls.__name__ == "LBFGS" for cls in type(optimizer).__mro__):
        raise ValueError(
            "LBFGS looks at all gradients at once, and calls the model again within a step: no "
            "server has either"
        )
    rest = {parameter: name for parameter, name in every.items() if parameter not in names}
    settings = context.current().settings
    if rest and settings.independent:
        raise ValueError(
            f"{next(iter(rest.values()))!r} would be reduced among the workers, and independent "
            "workers have no collectives: let all parameters go by the servers"
        )
    if context.role() == "server":
        groups = {  # The first table changes those of the optimizer.
            names[parameter]: group
            for group in optimizer.param_groups
            for parameter in group["params"]
            if hasattr(parameter, ROWS) and parameter in names
        }
        serve(
            lambda described: (
                _updater(optimizer, names, described, whole=partition == "tensor")
                if described.rows is None
                else _row_updater(optimizer, groups, described)
            )
        )
    options = TableOptions(
        chosen.name, chosen.staleness, op == ReduceOp.AVERAGE,
        PART_BYTES if partition == "element" else None, scale=chosen.scale,
    )  # fmt: skip
    base = type(optimizer)
    cls: Any = type(base.__name__, (PushingMixin, base), {"__module__": base.__module__})
    wrapped: Any = object.__new__(cls)
    wrapped.__dict__.update(
        (name, value)
        for name, value in vars(optimizer).items()
        if not callable(getattr(cls, name, None))
    )
    wrapped._rest = (
        ReducedParameters(optimizer, rest, op, backward_passes_per_step) if rest else None
    )
    wrapped._set_up(names, options, backward_passes_per_step)
    return wrapped


def set_param_ps(
    module_or_parameter: torch.nn.Module | torch.nn.Parameter, init_in_server: bool = False,
    seed: int = 0, initializer: str = NORMAL, scale: float = 1.0,
) -> None:  # fmt: skip
    """Let a parameter, or all of a module, go by the servers, and others by allreduce.

    Takes effect in the `DistributedOptimizer` that is made afterwards without `parameters`.

    With `init_in_server`, the rows of each ``nn.Embedding`` of the module lie on the servers alone:
    its weight becomes a tensor without rows (and may be on the device "meta" before), its forward
    pulls the rows of the batch, and steps push their gradients. What a row begins with depends on
    `seed`, the name of the weight and the number of the row; `initializer` is "normal" (`scale` is
    the standard deviation), "uniform" (from -`scale` to `scale`) or "zeros". Raises `ValueError`
    for a module without embeddings, and for embeddings with max_norm or scale_grad_by_freq.
    """
    if init_in_server:
        serve_rows(module_or_parameter, seed, initializer, scale)
    if isinstance(module_or_parameter, torch.nn.Module):
        for parameter in module_or_parameter.parameters():
            setattr(parameter, MARK, True)
    else:
        setattr(module_or_parameter, MARK, True)


def _chosen(
    every: Mapping[torch.Tensor, str], parameters: Sequence[str] | None
) -> dict[torch.Tensor, str]:
    """Return the parameters that go by the servers."""
    if parameters is None:
        marked = {tensor: name for tensor, name in every.items() if hasattr(tensor, MARK)}
        return marked or dict(every)
    names = set(matching(every.values(), parameters))
    return {tensor: name for tensor, name in every.items() if name in names}


def _names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]]
) -> dict[torch.Tensor, str]:
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter)")
    check_names([name for name, _ in pairs])
    names = {parameter: name for name, parameter in pairs}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if missing := [parameter for parameter in own if parameter not in names]:
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the {len(own)} parameters of the optimizer"
        )
    return {parameter: names[parameter] for parameter in own}


def specs_of(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> list[TensorSpec]:
    """Return what the table of an optimizer consists of."""
    return [
        TensorSpec(
            names[parameter], str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape),
            number,
        )
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter in names and not hasattr(parameter, ROWS)
    ]  # fmt: skip


def _updater(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str],
    described: TableDescription, *, whole: bool,
) -> TorchUpdater:  # fmt: skip
    own = specs_of(optimizer, names)
    for there, here in zip(described.specs, own, strict=False):
        if there != here:
            raise ValueError(f"a worker has the parameter {there}, and the server {here}")
    if len(described.specs) != len(own):
        counts = len(described.specs), len(own)
        raise ValueError("a worker has {} parameters, and the server {}".format(*counts))
    return TorchUpdater(optimizer, described, whole=whole)


def _row_updater(
    optimizer: torch.optim.Optimizer, groups: Mapping[str, Mapping[str, Any]],
    described: TableDescription,
) -> TorchRows:  # fmt: skip
    if described.name not in groups:
        raise ValueError(
            f"a worker has rows of {described.name!r}, and the server has none of them"
        )
    return TorchRows(new_store(described), optimizer, groups[described.name])


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


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches. Raises ValueError for one that matches nothing."""
    names = list(names)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"parameters={pattern!r} matches no name, such as {names[0]!r}")
    return [name for name in names if any(fnmatch.fnmatch(name, each) for each in patterns)]
