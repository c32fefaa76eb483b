"""A module or a function that runs on parts of tensors, inside a data-parallel model.

Outside, each rank has its own share of the batch, of equal size. Inside, tensors are cut as the
plan says; parameters are DTensors, whose local tensors the part works on. Gradients are those of
the average over ranks of their losses: as they are, for the parameters inside; and as
`DistributedOptimizer` averages them, for what lies before.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from hvdlite.common.base.warn import warn_user
from hvdlite.common.layouts.exchange import coarsest_mesh
from hvdlite.common.layouts.layout import Layout, from_cuts
from hvdlite.common.layouts.operators import Strategy, check_strategy
from hvdlite.common.layouts.propagation import check_search
from hvdlite.torch.autograd import untraced
from hvdlite.torch.process_group.registration import init_process_group
from hvdlite.torch.sharding.alltoalls import use_alltoalls
from hvdlite.torch.sharding.collectives import MeshCollectives
from hvdlite.torch.sharding.distribution import distribute, held_layout
from hvdlite.torch.sharding.dtensor import DTensor
from hvdlite.torch.sharding.leaves import Leaves, place_of
from hvdlite.torch.sharding.loading import cut_what_is_loaded
from hvdlite.torch.sharding.lowering import Lowered, Lowering
from hvdlite.torch.sharding.meshes import mesh as make_mesh
from hvdlite.torch.sharding.plans import Plan, named_tensors, plan, refuse_keras
from hvdlite.torch.sharding.record import is_ref
from hvdlite.torch.sharding.shares import check_shares, gathered, whole_batch
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
    memory_limit: int | None = None,
    strategies: Mapping[str, Strategy] | None = None,
    optimizer_states: int | None = None,
) -> F:
    """Cut a part of a model among ranks: by a strategy for its inputs, the rest by propagation.

    A module is changed and returned: its parameters become DTensors, under their names and with
    the values of rank 0. Make the optimizer after it. Of a module on the meta device each rank gets
    memory for its parts alone; load their values from a checkpoint afterwards. For a function, a
    function is returned, whose arguments are shares of a batch, and equal on all ranks where they
    are parameters. All ranks call `shard`, and what it returns, with shares of equal size.

    - `in_strategy`: for each tensor among the inputs a tuple of cuts of the whole batch, or None
      for those that it leaves to `set_strategy` and to propagation.
    - `out_strategy`: the same for the outputs: each rank gets its part. None: its share of the
      batch.
    - `strategies`: those of operators, by the names that the plan shows; they go before those of
      `set_strategy`.
    - `parameter_plan`: cuts, or a `Layout`, by the names of parameters.
    - `mesh`: what `mesh()` returns; None: the mesh with the fewest axes on which all layouts of
      parameters fit.
    - `fully_use_devices`: only strategies that use all ranks, where there are such.
    - `example`: an input, or a tuple of inputs, of this rank: a module with parameters needs it, as
      they are cut before an optimizer takes them. Meta tensors do.

    The part is recorded once for each shape of its inputs, and then runs as a graph on local
    tensors, with the collectives that the plan says. `search`, `memory_limit` and
    `optimizer_states` are those of `plan`. `device` and `level` have no effect. Raises `TypeError`
    and `ValueError` for strategies that do not fit, a function in its first call.
    """
    check_search(search)
    if device is not None or level is not None:
        warn_user("shard(device, level) have no effect: hvdlite has one device and level")
    configured: dict[str, Strategy] = dict(strategies or {})
    for name, strategy in configured.items():
        check_strategy(strategy, name)
    for end, given in (("input", in_strategy), ("output", out_strategy)):
        if given is not None:
            check_strategy(tuple(each for each in given if each is not None), f"{end} strategy")
            configured |= {f"{end}{i}": (cuts,) for i, cuts in enumerate(given) if cuts is not None}
    _check_target(fn_or_module)
    if mesh is not None and not callable(getattr(mesh, "size", None)):
        raise TypeError(f"mesh is a DeviceMesh, such as sharding.mesh() returns, not {mesh!r}")
    options = {
        "fully_use_devices": fully_use_devices, "search": search, "memory_limit": memory_limit,
        "optimizer_states": optimizer_states,
    }  # fmt: skip
    runner = _Runner(fn_or_module, configured, parameter_plan or {}, mesh, options)
    if isinstance(fn_or_module, torch.nn.Module):
        if example is None and any(True for _ in fn_or_module.parameters()):
            raise ValueError(
                "shard() of a module with parameters needs example=, an input of this rank: they "
                "are cut before an optimizer takes them"
            )
        runner.call = fn_or_module.forward
        if example is not None:
            runner.prepare(example if isinstance(example, tuple) else (example,))
        # Last, so that a module whose plan was refused may be sharded with another one.
        setattr(fn_or_module, ORIGINAL, runner.call)
        fn_or_module.forward = runner.run
        register: Any = fn_or_module._register_load_state_dict_pre_hook
        register(cut_what_is_loaded, with_module=True)
        for name, module in fn_or_module.named_modules():
            if name and any(isinstance(each, DTensor) for each in module._parameters.values()):
                module.register_forward_pre_hook(functools.partial(_refuse_alone, name))
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


def _refuse_alone(name: str, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse tensors that are not cut, which DTensor would do in words of its own.

    While the whole is recorded, other tensors stand for parameters.
    """
    cut = any(isinstance(each, DTensor) for each in module._parameters.values())
    tensors = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)]
    if cut and not all(isinstance(each, DTensor) for each in tensors):
        raise ValueError(
            f"{name} is a part of a module that shard() has cut, and was called alone: call the "
            "whole, or shard each of the parts that you call one by one"
        )


class _Function(torch.nn.Module):
    """A function as a module without parameters, for the trace."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


class _Runner:
    """What `shard` returns calls it; the first call with tensors of some shapes makes the plan."""

    def __init__(
        self,
        target: Any,
        configured: Mapping[str, Strategy],
        parameter_plan: Mapping[str, Sequence[int] | Layout],
        mesh: Any,
        options: Mapping[str, Any],
    ) -> None:
        is_module = isinstance(target, torch.nn.Module)
        self._module: torch.nn.Module = target if is_module else _Function(target)
        # Found once: what is recorded of them stays, and to find them takes long.
        self._modules = list(self._module.modules())
        self.call: Callable[..., Any] = target
        self._configured = configured
        self._parameter_plan = parameter_plan
        self._mesh = mesh
        self._options = options
        self._collectives: MeshCollectives | None = None
        # Of how many tensors a call has been planned for.
        self._tensors: int | None = None
        self._parts: dict[Any, _Part] = {}
        # Buffers that got memory here, and that no checkpoint has: their parts, as they were made.
        self._unfilled_buffers: dict[str, tuple[torch.Tensor, int]] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module or function on local tensors.

        Raises `TypeError` for keyword arguments that have no place among the others.
        """
        if kwargs:
            args = _in_a_row(self.call, args, kwargs)
        part, leaves = self._ready(args)
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        outputs = iter(part.lowered.graph(*tensors, *leaves))
        return tree_map(lambda each: next(outputs) if is_ref(each) else each, part.result)

    @untraced
    def _ready(self, args: tuple[Any, ...]) -> tuple[_Part, list[torch.Tensor]]:
        """Return the part for such arguments, and what this rank holds of its leaves.

        All ranks have then called it with equal shares.
        """
        leaves, spec = tree_flatten(args)
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        self._start()
        key = self._key(leaves, spec)
        part = self._parts.get(key)
        draws = part is None or part.lowered.draws
        seed = int(torch.randint(1 << 62, ()).item()) if draws else 0
        # Before all that one rank alone may refuse, while the others wait for it.
        seed = check_shares(tensors, self._mesh, seed)
        for index, each in enumerate(tensors):
            if isinstance(each, DTensor):
                raise ValueError(
                    f"tensor {index} of those that a sharded part is called with is a DTensor: "
                    "give this rank's share of the batch, such as its to_local()"
                )
        if part is None:
            if self._tensors not in (None, len(tensors)):
                raise ValueError(
                    f"a sharded part that was planned for {self._tensors} tensors is called with "
                    f"{len(tensors)}: give example= all of them, and shard another part for others"
                )
            part = self.prepare(args)
        if self._unfilled_buffers:
            self._check_filled(part)
        part.lowered.seed.value = seed
        for name, moved in part.lowered.warnings:
            _warn_once(name, moved)
        return part, part.leaves.local_tensors()

    def _check_filled(self, part: _Part) -> None:
        """Raise `ValueError` for a buffer without values, which NaN would come from."""
        for name, (local, version) in list(self._unfilled_buffers.items()):
            table, own = place_of(self._module, name)
            if table[own] is None or getattr(table[own], "_local_tensor", None) is not local:
                is_filled = True  # Another one took its place.
            elif local.is_floating_point() or local.is_complex():
                is_filled = not local.isnan().all()
            else:
                is_filled = local.is_inference() or local._version != version
            if is_filled:
                del self._unfilled_buffers[name]
            elif name in part.lowered.leaves:
                raise ValueError(
                    f"{name} has no values: it was made on the meta device, and no checkpoint has "
                    "it (persistent=False). Make it with device='cpu' before shard(), or fill it "
                    "afterwards, such as by zero_()"
                )

    def _start(self) -> None:
        if not dist.is_initialized():
            init_process_group()
        if self._collectives is None:
            self._collectives = MeshCollectives(self._mesh)

    def _key(self, leaves: Sequence[Any], spec: Any) -> Any:
        """Return what two calls have in common that run alike."""
        values = [
            (tuple(each.shape), each.dtype, isinstance(each, torch.nn.Parameter))
            if isinstance(each, torch.Tensor)
            else (type(each), each if isinstance(each, Hashable) else id(each))
            for each in leaves
        ]
        return (*values, str(spec), tuple([each.training for each in self._modules]))

    def prepare(self, args: Sequence[Any]) -> _Part:
        """Make the plan for inputs like these, and cut the parameters if they are not yet."""
        self._start()
        assert self._collectives is not None
        ranks = self._collectives.ranks
        example = tree_map(lambda each: whole_batch(each, ranks), tuple(args))
        found = self._agreed(
            lambda: plan(
                self._module, example, self._configured, _Ranks(ranks, self._mesh), **self._options
            )
        )
        assert found.found is not None
        traced = found.found.traced
        if self._tensors is None:
            self._cut_parameters(found)
        tensors = dict(named_tensors(self._module).values())
        leaves, spec = tree_flatten(args)
        given = [each for each in leaves if isinstance(each, torch.Tensor)]
        lowered = Lowering(
            traced, found.found.operators, found.found.choices,
            {name: held_layout(tensor, ranks) for name, tensor in tensors.items()},
            self._collectives, self._device(given),
            [isinstance(each, torch.nn.Parameter) for each in given],
        ).run()  # fmt: skip
        self._tensors = len(given)
        part = _Part(lowered, Leaves(self._module, lowered.leaves), traced.result)
        self._parts[self._key(leaves, spec)] = part
        return part

    def _agreed(self, make: Callable[[], Plan]) -> Plan:
        """Return the plan of this rank. Raises `ValueError` on all ranks if their plans differ."""
        try:
            found = make()
        except BaseException:
            gathered([-1], self._mesh)  # The others wait for what this rank has planned.
            raise
        digests = gathered([zlib.crc32(repr(list(found.items())).encode())], self._mesh)
        if -1 in digests:
            raise ValueError(f"rank {digests.index(-1)} cannot plan a sharded part that others can")
        if len(set(digests)) > 1:
            other = next(rank for rank, each in enumerate(digests) if each != digests[0])
            raise ValueError(
                f"ranks 0 and {other} plan a sharded part differently: give it the same module, "
                f"strategies and arguments on all ranks. Here it is\n{found}"
            )
        return found

    def _device(self, given: Sequence[torch.Tensor]) -> torch.device:
        devices = [each.device for each in [*self._module.parameters(), *given]]
        return next((each for each in devices if each.type != "meta"), torch.device("cpu"))

    def _cut_parameters(self, found: Plan) -> None:
        """Make the parameters DTensors, on the mesh with the fewest axes that has all layouts."""
        names = named_tensors(self._module)
        unknown = set(self._parameter_plan) - set(names)
        if unknown:
            raise ValueError(f"parameter_plan: {sorted(unknown)[0]!r} is no parameter")
        assert self._collectives is not None
        ranks = self._collectives.ranks
        layouts = dict(found.layouts)
        for name, cuts in self._parameter_plan.items():
            if not isinstance(cuts, Layout):
                check_strategy((tuple(cuts),), f"parameter_plan[{name!r}]")
            try:
                given = cuts if isinstance(cuts, Layout) else from_cuts(cuts, ranks)
                given.check_shape(names[name][1].shape)
            except ValueError as error:
                raise ValueError(f"parameter_plan[{name!r}]: {error}") from None
            layouts |= {n: given for n in names if names[n][0] == names[name][0]}
        if not names:
            return
        use_alltoalls()
        if self._mesh is None:
            self._mesh = make_mesh(coarsest_mesh(list(layouts.values()), ranks))
        self._unfilled_buffers = distribute(self._module, layouts, self._mesh)


@dataclass(frozen=True)
class _Part:
    """A part as it runs for tensors of some shapes: the graph, its leaves, and what it returns."""

    lowered: Lowered
    leaves: Leaves
    result: Any


@dataclass(frozen=True)
class _Ranks:
    """As much of a mesh as a plan looks at."""

    ranks: int
    whole: Any = None

    def size(self) -> int:
        return self.ranks

    @property
    def mesh(self) -> Any:
        """The numbers of its ranks, None for all of the job."""
        return None if self.whole is None else self.whole.mesh


@functools.cache
def _warn_once(name: str, moved: int) -> None:
    warn_user(
        f"{name} runs on whole inputs in a sharded part, for which each rank receives {moved} bytes"
    )


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
