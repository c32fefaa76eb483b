"""The optimizer of a worker: its step pushes gradients, and pulls what servers make of them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.warn import warn_user
from hvdlite.common.requests.handles import Handle
from hvdlite.ps import context
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.table import SKIP
from hvdlite.ps.worker.remote_rows import RemoteRows
from hvdlite.ps.worker.remote_table import RemoteTable
from hvdlite.ps.worker.shard import PsRolledBack
from hvdlite.ps.worker.table_shards import TableShards, step_together
from hvdlite.torch.mpi_ops import Max, allreduce
from hvdlite.torch.ps.arrays import Target, flat_array_of, is_plain
from hvdlite.torch.ps.embedding import ROWS, PulledRows
from hvdlite.torch.ps.parameters import ReducedParameters, specs_of
from hvdlite.torch.ps.updater import numbers_of
from hvdlite.torch.subclass import same_objects

TABLE = "optimizer"
SMALL_BYTES = 1 << 14  # So small gradients are copied faster than arrays of them are made.
FEW = 8


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
        _warn_of_decay(
            [(names[p], self.param_groups[n]) for p, n in chosen if not p.requires_grad],
            "is frozen",
        )
        # Those that the first step looks at.
        self._trained: Sequence[tuple[torch.Tensor, str, int]] = [
            (p, names[p], n) for p, n in chosen if p.requires_grad and not hasattr(p, ROWS)
        ]
        self._names = names
        self._list = [parameter for parameter, _ in chosen if not hasattr(parameter, ROWS)]
        self._versions: list[int] = []  # Of the parameters when the last step had ended.
        self._rows: list[tuple[PulledRows, RemoteRows, int]] = []
        self._targets: list[Target] = []
        self._gradients = Gradients(self._list)
        self._numbers: Sequence[Mapping[str, Any]] = []
        self._repeats_numbers = False
        self._table: RemoteTable | None = None
        self._follower: BackwardFollower | None = None
        if self._list:
            specs = specs_of(self, names)
            self._table = context.worker().declare(TABLE, specs, options, self._values)
            self._follower = BackwardFollower(self._list, self._table, passes)
            self._table.on_load = self._renew
        for parameter, number in chosen:
            if rows := getattr(parameter, ROWS, None):
                table = rows.declare(names[parameter], number, options)
                self._rows.append((rows, table, number))
        self._tables: list[TableShards] = [table for _, table, _ in self._rows]
        if self._table is not None:
            self._tables.append(self._table)
        step_together(self._tables)
        self._pull()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients, and pull the weights that the next step needs.

        With a `closure`, it is called once before. Raises `PsRolledBack` where the servers have
        lost steps, and `HorovodInternalError` where one is lost for good, or where servers have
        lost steps and some parameters go by allreduce, which do not go back.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._push_and_pull()
        except PsRolledBack as error:
            self._tables[0].forget_rollback()
            if self._rest is not None:
                raise HorovodInternalError(
                    f"{error}: parameters that go by allreduce have made the steps that are lost, "
                    "and do not go back. Go on from a checkpoint of all parameters"
                ) from error
            self._renew()
            raise
        return loss

    def _renew(self) -> None:
        """Take the weights of another step, to which the servers have gone back."""
        # They may have other numbers, and drop those of steps that are made again.
        self._repeats_numbers = True
        self._pull()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: servers keep what the optimizer had when it was made."""
        raise ValueError(
            "servers step over the parameters that the optimizer had when ps.DistributedOptimizer "
            "was made: give it all of them before"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the numbers of groups, and the state of parameters that go by allreduce.

        Raises ValueError where there is state of others, which lies on the servers.
        """
        state = state_dict["state"]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        check_no_state(
            {p: state[key] for key, p in zip(keys, own, strict=False) if key in state}, self._names
        )
        with same_objects(self):
            super().load_state_dict(state_dict)

    def _push_and_pull(self) -> None:
        self._warn_of_changes()
        body: dict[str, Any] = {}
        skips = self._overflow()
        if skips:
            body[SKIP] = True
        else:
            numbers = [numbers_of(group) for group in self.param_groups]
            if numbers != self._numbers or self._repeats_numbers:
                body["numbers"] = self._numbers = numbers
        if self._follower is not None:
            self._follower.end_step()
        if self._trained and not skips:
            trained, self._trained = self._trained, ()
            _warn_of_decay(
                [(name, self.param_groups[n]) for p, name, n in trained if p.grad is None],
                "has no gradient in the first step",
            )
        # What does not fit is said before one table has the step and others have not.
        taken = [table.checked(*rows.take(self._scale)) for rows, table, _ in self._rows]
        if self._table is not None:
            self._table.push([] if skips else self._gradients.arrays(self._scale), body)
        handles: list[Handle] = []
        for (_, table, number), (ids, gradients) in zip(self._rows, taken, strict=True):
            if skips:
                handles.append(table.skip())
            else:
                given = {"numbers": [body["numbers"][number]]} if "numbers" in body else {}
                handles.append(table.push(ids, gradients, given))
        if self._rest is not None and skips:
            self._rest.optimizer.synchronize()
        elif self._rest is not None:  # While the servers make their steps.
            self._rest.step(self, self._scale)
        self._pull()
        for handle in handles:
            handle.wait()

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
        if self._rest is not None:  # All of them skip the step then.
            found_inf = allreduce(found_inf.detach().clone(), op=Max, name="ps.found_inf")
        return bool(found_inf.item())

    @property
    def _scale(self) -> torch.Tensor | None:
        """What gradients are to be divided by: a GradScaler sets it for the time of a step."""
        return getattr(self, "grad_scale", None)

    def synchronize(self) -> None:
        """Wait for the gradients that go by allreduce; those for servers stay this worker's own."""
        if self._rest is not None:
            self._rest.optimizer.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Let `step` find gradients that `synchronize` has reduced, and that may have changed."""
        if self._rest is None:
            return nullcontext()
        return self._rest.optimizer.skip_synchronize()  # type: ignore[no-any-return]

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
        self._versions = [parameter._version for parameter in self._list]

    def _warn_of_changes(self) -> None:
        """Say so where weights have changed since the last step, which the next one undoes."""
        versions = [parameter._version for parameter in self._list]
        if self._table is None or versions == self._versions:
            return
        self._versions = versions
        if name := self._table.first_changed(map(flat_array_of, self._list)):
            warn_user(context.CHANGED.format(name, "model.load_state_dict()"))


def check_no_state(
    state: Mapping[torch.Tensor, Mapping[str, Any]], names: Mapping[torch.Tensor, str]
) -> None:
    """Raise ValueError where an optimizer has made steps with parameters that go by servers."""
    for parameter, own in state.items():
        known = [key for key, value in own.items() if value is not None]
        if known and parameter in names and float(own.get("step", 1)) > 0:
            raise ValueError(
                f"there is a state of {names[parameter]} ({', '.join(known)}), and that of what "
                "goes by servers lies there: ps.save and ps.load are for it. Else wrap an "
                "optimizer that has made no step"
            )


# The gradients of parameters as flat arrays; many small ones cost little more than one.


def _warn_of_decay(still: Sequence[tuple[str, Mapping[str, Any]]], why: str) -> None:
    """Say that servers decay parameters which PyTorch would leave alone."""
    decayed = [name for name, group in still if group.get("weight_decay")]
    if decayed:
        warn_user(
            f"{decayed[0]} {why} ({len(decayed)} in all), and servers step over it with a "
            "gradient of zeros, so that weight decay changes it: leave such parameters out of "
            "the optimizer, or in a group without weight decay"
        )


class Gradients:
    """The gradients of these parameters, step by step."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        small: defaultdict[torch.dtype, list[int]] = defaultdict(list)
        for number, parameter in enumerate(self._parameters):
            if parameter.device.type == "cpu" and parameter.nbytes <= SMALL_BYTES:
                small[parameter.dtype].append(number)
        self._groups = [
            _Group(numbers, [self._parameters[number] for number in numbers])
            for numbers in small.values()
            if len(numbers) >= FEW
        ]

    def arrays(self, scale: torch.Tensor | None) -> list[Array]:
        """Return flat arrays, divided by `scale`: zeros where there is no gradient.

        They count until the gradients change, or until the next call.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        found: list[Array | None] = [None] * len(gradients)
        if scale is None:
            for group in self._groups:
                group.copy(gradients, found)
        return [
            self._one(number, gradients[number], scale) if array is None else array
            for number, array in enumerate(found)
        ]

    def _one(self, number: int, gradient: torch.Tensor | None, scale: torch.Tensor | None) -> Array:
        if gradient is None:
            gradient = torch.zeros_like(self._parameters[number])
        elif gradient.is_sparse:  # Of nn.Embedding(sparse=True).
            gradient = gradient.to_dense()
        if scale is not None:
            gradient = gradient / scale.to(gradient.dtype)
        return flat_array_of(gradient)


class _Group:
    """Parameters of one dtype, and memory for their gradients."""

    def __init__(self, numbers: list[int], parameters: Sequence[torch.Tensor]) -> None:
        self._numbers = numbers
        memory = torch.empty(sum(each.numel() for each in parameters), dtype=parameters[0].dtype)
        pieces = torch.split(memory, [each.numel() for each in parameters])
        self._copies = [
            piece.view(each.shape) for piece, each in zip(pieces, parameters, strict=True)
        ]
        self._arrays = [flat_array_of(piece) for piece in pieces]

    @torch.no_grad()
    def copy(self, gradients: Sequence[torch.Tensor | None], found: list[Array | None]) -> None:
        """Put arrays of the gradients into `found`, unless some are missing or sparse."""
        own = [each for number in self._numbers if (each := gradients[number]) is not None]
        if len(own) == len(self._numbers) and {each.layout for each in own} == {torch.strided}:
            torch._foreach_copy_(self._copies, own)
            for number, array in zip(self._numbers, self._arrays, strict=True):
                found[number] = array


# Gradients that are sent to servers while backward computes those of the layers before.


class BackwardFollower:
    """Passes each gradient on when `passes` backward passes have added to it.

    The order is that in which backward has them: the last layers first. Where more passes come than
    `passes`, or something else changes gradients, the push itself finds it.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], table: RemoteTable, passes: int) -> None:
        self._table, self._passes = table, passes
        self._counts = [0] * len(parameters)
        for number, parameter in enumerate(parameters):
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                weakref.finalize(self, register(_hook(weakref.ref(self), number)).remove)

    def end_step(self) -> None:
        """Take note that the gradients are pushed."""
        self._counts = [0] * len(self._counts)

    def note(self, number: int, parameter: torch.Tensor) -> None:
        """Take note of a pass that has added to a gradient, in the thread of backward."""
        self._counts[number] += 1
        gradient = parameter.grad
        if self._counts[number] != self._passes or gradient is None or gradient.is_sparse:
            return
        if is_plain(gradient):  # Others would wait here until they are copied to the host.
            self._table.push_early(number, lambda: flat_array_of(gradient))


def _hook(follower: weakref.ref[BackwardFollower], number: int) -> Callable[[torch.Tensor], None]:
    def note(parameter: torch.Tensor) -> None:
        found = follower()
        if found is not None:
            found.note(number, parameter)

    return note
