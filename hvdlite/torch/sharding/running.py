"""A module or a function that runs under DTensor, inside a data-parallel model.

Outside, tensors are plain, and each rank has its own share of the batch, of equal size. Inside,
they are DTensors of the whole batch, cut as the plan says. Gradients are those of the average over
ranks of their losses: as they are, for the parameters inside; and as `DistributedOptimizer`
averages them, for what lies before.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hvdlite.common.base.warn import warn_user
from hvdlite.common.layouts.layout import Layout, from_cuts
from hvdlite.common.layouts.operators import Strategy, check_strategy
from hvdlite.common.layouts.propagation import check_search
from hvdlite.torch.sharding.alltoalls import use_alltoalls
from hvdlite.torch.sharding.dtensor import (
    DTensor,
    Partial,
    Shard,
    distribute_tensor,
    implicit_replication,
)
from hvdlite.torch.sharding.inside import EqualNumbers, WholeFallback, whole_placements
from hvdlite.torch.sharding.meshes import mesh as make_mesh
from hvdlite.torch.sharding.meshes import placements
from hvdlite.torch.sharding.plans import Plan, named_tensors, plan, refuse_keras
from hvdlite.torch.sharding.shares import (
    batch_placements,
    check_shares,
    scale_gradient,
    whole_batch,
)
from hvdlite.torch.sharding.tracing import ORIGINAL

F = TypeVar("F", bound=Callable[..., Any])
# The cuts of each input or output, or None for those that are left to propagation.
Ends = tuple[tuple[int, ...] | None, ...]


def shard(
    fn_or_module: F,
    in_strategy: Ends | None = None,
    out_strategy: Ends | None = None,
    parameter_plan: Mapping[str, Sequence[int] | Layout] | None = None,
    mesh: Any = None,
    search: str = "propagation",
    fully_use_devices: bool = True,
    device: Any = None,
    level: Any = None,
    example: Any = None,
) -> F:
    """Cut a part of a model among ranks: by a strategy for its inputs, the rest by propagation.

    A module is changed and returned: its parameters become DTensors, under their names and with
    the values of rank 0. Make the optimizer after it. For a function, a function is returned, whose
    arguments are shares of a batch, and equal on all ranks where they are parameters. All ranks
    call `shard`, and what it returns, with shares of equal size.

    - `in_strategy`: for each tensor among the inputs a tuple of cuts of the whole batch, or None
      for those that it leaves to `set_strategy` and to propagation.
    - `out_strategy`: the same for the outputs: each rank gets its part. None: its share of the
      batch.
    - `parameter_plan`: cuts, or a `Layout`, by the names of parameters.
    - `mesh`: what `mesh()` returns; None: `mesh()`.
    - `fully_use_devices`: only strategies that use all ranks, where there are such.
    - `example`: an input, or a tuple of inputs, of this rank: a module with parameters needs it, as
      they are cut before an optimizer takes them. Meta tensors do.

    The plan decides how parameters, inputs and outputs are cut, and what submodules with a strategy
    of `set_strategy` are called with; in between DTensor goes on from there. `search` is
    "propagation". `device` and `level` have no effect. Raises `TypeError` and `ValueError` for
    strategies that do not fit, a function in its first call.
    """
    check_search(search)
    if device is not None or level is not None:
        warn_user("shard(device, level) have no effect: hvdlite has one device and level")
    configured: dict[str, Strategy] = {}
    for end, given in (("input", in_strategy), ("output", out_strategy)):
        if given is not None:
            check_strategy(tuple(each for each in given if each is not None), f"{end} strategy")
            configured |= {f"{end}{i}": (cuts,) for i, cuts in enumerate(given) if cuts is not None}
    _check_target(fn_or_module)
    runner = _Runner(fn_or_module, configured, parameter_plan or {}, mesh, fully_use_devices)
    if isinstance(fn_or_module, torch.nn.Module):
        if example is None and any(True for _ in fn_or_module.parameters()):
            raise ValueError(
                "shard() of a module with parameters needs example=, an input of this rank: they "
                "are cut before an optimizer takes them"
            )
        runner.call = fn_or_module.forward
        setattr(fn_or_module, ORIGINAL, runner.call)
        if example is not None:
            runner.prepare(example if isinstance(example, tuple) else (example,))
        fn_or_module.forward = runner.run
        return fn_or_module

    @functools.wraps(fn_or_module)
    def run(*args: Any, **kwargs: Any) -> Any:
        return runner.run(*args, **kwargs)

    return run  # type: ignore[return-value]


def _check_target(target: Any) -> None:
    """Raise `ValueError` for a module that has a sharded one, or one of Keras, in it or is one."""
    refuse_keras(target)
    if isinstance(target, torch.nn.Module):
        for name, module in target.named_modules():
            if ORIGINAL in module.__dict__:
                raise ValueError(
                    f"{name or type(target).__name__} is sharded already: shard the whole, or "
                    "parts beside each other"
                )


class _Function(torch.nn.Module):
    """A function as a module without parameters, for the trace."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


class _Runner:
    """What `shard` returns calls it; the first call makes the plan."""

    def __init__(
        self,
        target: Any,
        configured: Mapping[str, Strategy],
        parameter_plan: Mapping[str, Sequence[int] | Layout],
        mesh: Any,
        fully_use_devices: bool,
    ) -> None:
        is_module = isinstance(target, torch.nn.Module)
        self._module: torch.nn.Module = target if is_module else _Function(target)
        self.call: Callable[..., Any] = target
        self._configured = configured
        self._parameter_plan = parameter_plan
        self._mesh = mesh
        self._fully = fully_use_devices
        self._plan: Plan | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module or function under DTensor, and return plain tensors.

        Raises `TypeError` for keyword arguments that have no place among the others.
        """
        if kwargs:
            args = _in_a_row(self.call, args, kwargs)
        if self._mesh is None:
            self._mesh = make_mesh()
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        # Before all that one rank alone may refuse, while the others wait for it.
        check_shares(tensors, self._mesh)
        planned = self._plan or self.prepare(args)
        if len(tensors) != len(planned.inputs):
            raise ValueError(
                f"a sharded part that was planned for {len(planned.inputs)} tensors is called with "
                f"{len(tensors)}: give example= all of them, and shard another part for others"
            )
        layouts = iter(planned.inputs)
        entered = tree_map(
            lambda each: (
                self._enter(each, next(layouts)) if isinstance(each, torch.Tensor) else each
            ),
            args,
        )
        with implicit_replication(), WholeFallback(self._mesh), EqualNumbers(self._mesh):
            result = self.call(*entered)
        outputs = itertools.count()
        return tree_map(
            lambda each: (
                self._leave(each, next(outputs)) if isinstance(each, torch.Tensor) else each
            ),
            result,
        )

    def prepare(self, args: Sequence[Any]) -> Plan:
        """Make the plan for inputs like these, and cut the parameters."""
        if self._mesh is None:
            self._mesh = make_mesh()
        use_alltoalls()
        ranks = self._mesh.size()
        example = tree_map(lambda each: whole_batch(each, ranks), tuple(args))
        found = plan(self._module, example, self._configured, self._mesh, self._fully)
        names = named_tensors(self._module)
        unknown = set(self._parameter_plan) - set(names)
        if unknown:
            raise ValueError(f"parameter_plan: {sorted(unknown)[0]!r} is no parameter")
        for name, cuts in self._parameter_plan.items():
            given = cuts if isinstance(cuts, Layout) else from_cuts(cuts, ranks)
            found.layouts |= {n: given for n in names if names[n][0] == names[name][0]}
        self._distribute(found)
        for name, layouts in found.entering.items():
            self._module.get_submodule(name).register_forward_pre_hook(
                self._cut_anew(layouts), with_kwargs=True
            )
        self._plan = found
        return found

    def _cut_anew(self, layouts: Sequence[Layout | None]) -> Callable[..., Any]:
        """Return a hook that cuts what a submodule is called with as its strategy says."""

        def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            left = iter(layouts)

            def place(value: Any) -> Any:
                layout = next(left, None) if isinstance(value, torch.Tensor) else None
                if layout is None or not isinstance(value, DTensor):
                    return value
                return value.redistribute(self._mesh, self._placements(layout, value.shape))

            return tree_map(place, (args, kwargs))

        return enter

    def _distribute(self, found: Plan) -> None:
        cut: dict[int, Any] = {}
        for name, (first, tensor) in named_tensors(self._module).items():
            if name != first:
                continue
            where = self._placements(found.layouts[name], tensor.shape)
            cut[id(tensor)] = value = distribute_tensor(tensor.detach(), self._mesh, where)
            if isinstance(tensor, torch.nn.Parameter):
                parameter = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
                cut[id(tensor)] = parameter
        for submodule in self._module.modules():
            tables: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
            for table in tables:
                table.update(
                    {name: cut[id(each)] for name, each in table.items() if id(each) in cut}
                )

    def _placements(self, layout: Layout, shape: Sequence[int]) -> list[Any]:
        layout.check_shape(shape)
        return placements(layout, self._mesh)

    def _enter(self, tensor: torch.Tensor, layout: Layout) -> Any:
        shared = isinstance(tensor, torch.nn.Parameter)
        held = tensor if shared else scale_gradient(tensor, float(self._mesh.size()))
        where = batch_placements(tensor, self._mesh) if not shared else whole_placements(self._mesh)
        whole = DTensor.from_local(held, self._mesh, where, run_check=False)
        return whole.redistribute(self._mesh, placements(layout, self._mesh))

    def _leave(self, tensor: Any, index: int) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            whole: torch.Tensor = tensor
            return whole  # The part has made it of no input, so that each rank has all of it.
        where = batch_placements(tensor, self._mesh)
        if self._plan is not None and index in self._plan.outputs:
            where = placements(self._plan.outputs[index], self._mesh)
        placed = tensor.redistribute(self._mesh, where)
        # Ranks that get equal values have losses of their own, whose gradients add up.
        gradients = [each if isinstance(each, Shard) else Partial() for each in where]
        held = placed.to_local(grad_placements=gradients)
        return scale_gradient(held, 1 / self._mesh.size())


def _in_a_row(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return all arguments by position, as strategies number them, with defaults in the gaps."""
    try:
        bound = inspect.signature(call).bind(*args, **kwargs)
    except ValueError as error:  # Functions of C have no signature.
        raise TypeError(f"a sharded part takes no keyword arguments here: {error}") from None
    bound.apply_defaults()
    beside = sorted(set(bound.kwargs) & set(kwargs))
    if beside:
        raise TypeError(
            f"a sharded part takes {beside[0]!r} only by keyword, and strategies number arguments "
            "by position: give the function a parameter for it that has one"
        )
    return bound.args
