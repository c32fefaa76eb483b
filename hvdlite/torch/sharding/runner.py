"""A planned part as it runs: the first call with tensors of some shapes makes the plan."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from hvdlite.common.base.warn import warn_user
from hvdlite.common.layouts.exchange import coarsest_mesh
from hvdlite.common.layouts.layout import Layout, from_cuts
from hvdlite.common.layouts.operators import Strategy, check_strategy
from hvdlite.torch.autograd import untraced
from hvdlite.torch.process_group.registration import init_process_group
from hvdlite.torch.sharding.collectives import MeshCollectives
from hvdlite.torch.sharding.distribution import distribute, held_layout
from hvdlite.torch.sharding.dtensor import DTensor
from hvdlite.torch.sharding.graph.lowering import Lowered, Lowering
from hvdlite.torch.sharding.leaves import Leaves, place_of
from hvdlite.torch.sharding.meshes import mesh as make_mesh
from hvdlite.torch.sharding.meshes import use_alltoalls
from hvdlite.torch.sharding.planning.calls import autocasts, is_ref
from hvdlite.torch.sharding.planning.planner import named_tensors, plan
from hvdlite.torch.sharding.planning.plans import Plan
from hvdlite.torch.sharding.shares import check_shares, gathered, whole_batch


class _Function(torch.nn.Module):
    """A function as a module without parameters, for the trace."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


class Runner:
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
        modes = self._modes()
        part = self._find(leaves, spec, modes)
        draws = part is None or part.lowered.draws
        seed = int(torch.randint(1 << 62, ()).item()) if draws else 0
        # Before all that one rank alone may refuse, while the others wait for it.
        digest = _digest(leaves, modes)
        seed = check_shares(tensors, self._mesh, part is not None, digest, seed)
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

    def _modes(self) -> Any:
        """Return how the module and its operators run now: train() or eval(), and autocast."""
        return bytes([bool(each.training) for each in self._modules]), autocasts()

    def _find(self, leaves: Sequence[Any], spec: Any, modes: Any) -> _Part | None:
        """Return the part for such arguments, if there is one: not for what `prepare` refuses.

        The attributes of modules still are the constants of its graph.
        """
        try:
            part = self._parts.get(_key(leaves, spec, modes))
        except TypeError:
            return None
        if part is None or not all(
            table.get(name) is tensor for table, name, tensor in part.attributes
        ):
            return None
        return part

    def prepare(self, args: Sequence[Any]) -> _Part:
        """Make the plan for inputs like these, and cut the parameters if they are not yet."""
        self._start()
        assert self._collectives is not None
        ranks = self._collectives.ranks
        example = tree_map(lambda each: whole_batch(each, ranks), tuple(args))
        leaves, spec = tree_flatten(args)

        def make() -> Plan:
            _key(leaves, spec, self._modes())  # Raises for what has no key.
            mesh = _Ranks(ranks, self._mesh)
            return plan(self._module, example, self._configured, mesh, **self._options)

        found = self._agreed(make)
        assert found.found is not None
        traced = found.found.traced
        if self._tensors is None:
            self._cut_parameters(found)
        tensors = dict(named_tensors(self._module).values())
        given = [each for each in leaves if isinstance(each, torch.Tensor)]
        lowered = Lowering(
            traced, found.found.operators, found.found.choices,
            {name: held_layout(tensor, ranks) for name, tensor in tensors.items()},
            self._collectives, self._device(given),
            [isinstance(each, torch.nn.Parameter) for each in given],
        ).run()  # fmt: skip
        self._tensors = len(given)
        constants = {id(each) for each in traced.record.constants.values()}
        attributes = [
            (vars(module), name, value)
            for module in self._modules
            for name, value in vars(module).items()
            if id(value) in constants
        ]
        part = _Part(lowered, Leaves(self._module, lowered.leaves), traced.result, attributes)
        self._parts[_key(leaves, spec, self._modes())] = part
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
    # Attributes whose tensors are constants of the graph, each with its table and its name.
    attributes: Sequence[tuple[Mapping[str, Any], str, torch.Tensor]]


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


def _key(leaves: Sequence[Any], spec: Any, modes: Any) -> Any:
    """Return what two calls have in common that run alike.

    Raises `TypeError` for an argument of which that cannot be said.
    """
    values = [
        (tuple(each.shape), each.dtype, isinstance(each, torch.nn.Parameter))
        if isinstance(each, torch.Tensor)
        else (type(each), _fixed(each))
        for each in leaves
    ]
    return (*values, str(spec), modes)


def _digest(leaves: Sequence[Any], modes: Any) -> int:
    """Return a number that calls on all ranks have in common: of a key as far as it is text."""
    values = [
        (each.dtype, isinstance(each, DTensor), isinstance(each, torch.nn.Parameter))
        if isinstance(each, torch.Tensor)
        else each
        if isinstance(each, (int, float, complex, str, bytes))
        else None
        for each in leaves
    ]
    return zlib.crc32(repr((values, modes)).encode())


def _fixed(value: Any) -> Any:
    """Return what stands for an argument that is no tensor: its values, which are in the plan.

    Raises `TypeError` for an object that may change unseen.
    """
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, float | complex):  # 0.0 and -0.0 are equal, and NaN is none to itself.
        return repr(value)
    if isinstance(value, slice):  # Not hashable before Python 3.12.
        value = value.start, value.stop, value.step
    elif isinstance(value, set):
        value = frozenset(value)
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"a sharded part is called with a {type(value).__name__}, which may change between "
            "calls while the plan has its values: give tensors, arrays of numbers, or what is "
            "hashable, such as numbers, texts and tuples of them"
        ) from None
    return value


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
