"""``DistributedOptimizer(..., shard_state=True)`` for Keras 3: a part of the state on each rank.

gradients -> flat, by dtype -> reducescatter -> the optimizer's step on one flat shard -> allgather
-> the variables. The optimizer is built for the shards, and knows no other variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.keras.framework import adapter, keras
from hvdlite.keras.gradient_exchange import Exchange, Settings, Then
from hvdlite.keras.optimizer_families import check_variable, parts_of

Method = Callable[..., Any]


class _Shard:
    """Variables of one dtype in a row, of which a part is this rank's."""

    def __init__(self, variables: Sequence[Any], rank: int, size: int) -> None:
        self.variables = list(variables)
        self.sizes = [int(np.prod(variable.shape)) for variable in self.variables]
        total = sum(self.sizes)
        self.length = -(-total // size)
        self.padding = self.length * size - total
        self.begin = rank * self.length
        self.dtype = self.variables[0].dtype
        self.variable = keras.Variable(
            np.zeros(self.length), dtype=self.dtype, trainable=False, name="shard"
        )

    def flat(self, values: Sequence[Any]) -> Any:
        """Return values of the variables in a row; None is zeros."""
        rows = [
            keras.ops.zeros((size,), self.dtype)
            if value is None
            else keras.ops.cast(keras.ops.reshape(value, (-1,)), self.dtype)
            for value, size in zip(values, self.sizes, strict=True)
        ]
        return keras.ops.concatenate([*rows, keras.ops.zeros((self.padding,), self.dtype)])

    def own_values(self, values: Sequence[Any]) -> Any:
        """Return this rank's part of such a row, without making the rest of it."""
        parts, start, end = [], 0, self.begin + self.length
        for value, size in zip(values, self.sizes, strict=True):
            first, last = max(self.begin, start) - start, min(end, start + size) - start
            if first < last:
                parts.append(keras.ops.reshape(value, (-1,))[first:last])
            start += size
        missing = self.length - sum(int(part.shape[0]) for part in parts)
        return keras.ops.concatenate([*parts, keras.ops.zeros((missing,), self.dtype)])

    def split(self, flat: Any) -> list[Any]:
        """Return the values of the variables from a row."""
        values, start = [], 0
        for variable, size in zip(self.variables, self.sizes, strict=True):
            values.append(keras.ops.reshape(flat[start : start + size], variable.shape))
            start += size
        return values


def _build(method: Method, exchange: ShardedExchange, optimizer: Any, variables: Any) -> Any:
    """Replace ``build()``: the optimizer gets state for the shards of these variables."""
    return method(optimizer, exchange.arrange(list(variables)))


def _consolidate(_: Any, exchange: ShardedExchange, optimizer: Any) -> Any:
    """Return a plain optimizer with all of the state, as one process would have; collective.

    It is built for the model's variables, and can be saved, or given to `adopt`.
    """
    return exchange.consolidate(optimizer)


def _adopt(_: Any, exchange: ShardedExchange, optimizer: Any, plain: Any) -> None:
    """Take over this rank's part of the state of a plain optimizer, built for all variables.

    They may be of another model, such as one that was loaded, of the same shapes and dtypes in the
    same order. Raises `ValueError` where they differ from those of this optimizer; if it is not
    built, its first step or `build` does.
    """
    exchange.adopt(optimizer, plain)


class ShardedExchange(Exchange):
    """The exchange of an optimizer whose state is divided among the ranks."""

    more_entries: ClassVar[dict[str, Method]] = {
        "build": _build,
        "consolidate": _consolidate,
        "adopt": _adopt,
    }

    state_is_common = False

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._shards: list[_Shard] = []
        self._variables: list[Any] = []  # Those of all shards, in the order of the model.
        self._place = (0, 1)
        # Whether it was built for the variables of an optimizer that it has adopted. Those of its
        # own model, which nobody knows by then, take their places when they come.
        self._awaits_own = False

    def own_state(self, optimizer: Any) -> list[Any]:
        """See `Exchange`."""
        shards = [shard.variable for shard in self._shards]
        slots = [slot for _, values in _slots(optimizer, shards) for slot in values]
        return [*shards, *filter(_is_state, slots)] if shards else []

    def targets(self, variables: Any) -> Any:
        return [shard.variable for shard in self._shards] if self._shards else variables

    def sources(self, built: Sequence[Any]) -> list[Any]:
        return list(self._variables if self._shards else built)

    def arrange(self, variables: list[Any]) -> list[Any]:
        """Return the shards of these variables, made at the first call. Raises `ValueError`."""
        process_set = self.settings.reduction.process_set
        shards = {id(shard.variable) for shard in self._shards}
        if shards and {id(variable) for variable in variables} <= shards:
            return variables
        if self._awaits_own:
            self._replace(variables)
            self._awaits_own = False
        if not self.settings.reduction.active:
            return variables
        if not self._shards:
            for variable in variables:
                check_variable(variable, "shard_state=True", "leave shard_state out")
            self._place = process_set.rank() or 0, process_set.size()
            by_dtype: dict[str, list[Any]] = {}
            for variable in variables:
                by_dtype.setdefault(str(variable.dtype), []).append(variable)
            self._shards = [_Shard(each, *self._place) for each in by_dtype.values()]
            self._variables = variables
        self._check_own(variables)
        _, size = self._place
        if size != process_set.size():
            raise RuntimeError(
                f"shard_state=True: the state was divided among {size} ranks, and there are "
                f"{process_set.size()} now: consolidate() before, and adopt() in a new optimizer"
            )
        return [shard.variable for shard in self._shards]

    def _check_own(self, variables: Sequence[Any]) -> None:
        """Raise `ValueError` for other variables than those that the optimizer was built for."""
        own = {*map(id, self._variables)}
        if {*map(id, variables)} == own:
            return
        if len(variables) != len(own):
            raise ValueError(
                f"shard_state=True: gradients of {len(variables)} variables for an optimizer that "
                f"was built for {len(own)}: give those of all variables in each step"
            )
        other = next(each for each in variables if id(each) not in own)
        raise ValueError(
            "shard_state=True: the optimizer was built for other variables, of another model "
            f"object: the first that it does not know is {other.path}. Each model needs an "
            "optimizer of its own, which may adopt() the state of another one"
        )

    def _replace(self, variables: list[Any]) -> None:
        """Put the variables of the model in the places of those that it was built for."""
        optimizer = self._wrapped()
        before = self.sources(optimizer._trainable_variables)
        if {*map(id, variables)} == {*map(id, before)}:
            return
        _check_alike(variables, before)
        if not self._shards:  # This rank is alone: Keras knows the variables.
            # Keras would track plain attributes.
            vars(optimizer)["_trainable_variables"] = list(variables)
            keys = map(optimizer._var_key, variables)
            vars(optimizer)["_trainable_variables_indices"] = {key: i for i, key in enumerate(keys)}
            return
        new_of = dict(zip(map(id, before), variables, strict=True))
        for shard in self._shards:
            shard.variables = [new_of[id(variable)] for variable in shard.variables]
        self._variables = variables

    def _apply(self, gradients: Sequence[Any], variables: Sequence[Any], then: Then) -> Any:
        self.arrange(list(variables))
        if not self._shards:
            return super()._apply(gradients, variables, then)
        gradient_of = {
            id(variable): gradient for variable, gradient in zip(variables, gradients, strict=True)
        }
        reduced = []
        for number, shard in enumerate(self._shards):
            reduced.append(self._reduce(number, shard, gradient_of))
            values = [keras.ops.stop_gradient(each.value) for each in shard.variables]
            shard.variable.assign(shard.own_values(values))
        if len([*parts_of(self._optimizer())]) > 1:  # A loss scaler is around it.
            reduced = self._overflow_together(reduced)
        with self._gradients_are_reduced():
            result = then(reduced)
        for number, shard in enumerate(self._shards):
            value = keras.ops.stop_gradient(shard.variable.value)
            for variable, part in zip(
                shard.variables, shard.split(self._gather(number, "weights", value)), strict=True
            ):
                variable.assign(part)
        self.check_weights(variables)
        return result

    def _reduce(self, number: int, shard: _Shard, gradient_of: dict[int, Any]) -> Any:
        reduction = self.settings.reduction
        gradients = [gradient_of[id(variable)] for variable in shard.variables]
        flat = keras.ops.stop_gradient(shard.flat([_dense(each, reduction) for each in gradients]))
        part = adapter().reducescatter(
            flat,
            compression=reduction.compression,
            op=reduction.scaling.op,
            name=f"{self.settings.prefix}.shard.{number}.gradients",
            process_set=reduction.process_set,
            prescale_factor=reduction.scaling.prescale_factor,
            postscale_factor=reduction.scaling.postscale_factor,
        )
        return keras.ops.reshape(part, (shard.length,))

    def _overflow_together(self, reduced: Sequence[Any]) -> list[Any]:
        """Return NaN in place of all gradients where the part of any rank has overflowed.

        A loss scaler skips the step then. It decides by the part of its rank, and all must alike.
        """
        finite = [keras.ops.all(keras.ops.isfinite(part)) for part in reduced]
        overflow = keras.ops.logical_not(keras.ops.all(keras.ops.stack(finite)))
        anywhere = adapter().allreduce(
            keras.ops.cast(overflow, "float32"),
            op=ReduceOp.MAX,
            name=f"{self.settings.prefix}.shard.overflow",
            process_set=self.settings.reduction.process_set,
        )
        return [
            keras.ops.where(anywhere > 0, keras.ops.full_like(part, np.nan), part)
            for part in reduced
        ]

    def _gather(self, number: int, what: str, value: Any) -> Any:
        name = f"{self.settings.prefix}.shard.{number}.{what}"
        process_set = self.settings.reduction.process_set
        return adapter().allgather(value, name=name, process_set=process_set)

    def consolidate(self, optimizer: Any) -> Any:
        """Return a plain optimizer with all of the state; all ranks take part."""
        base: Any = type(optimizer).__mro__[2]  # behind the derived class and `Distributed`
        plain = base.from_config(optimizer.get_config())
        variables = self.sources(getattr(optimizer, "_trainable_variables", []))
        plain.build(variables)
        if not self._shards:  # This rank is alone.
            with self.lasting_only():
                _copy_variables(plain, optimizer)
            return plain
        slots_by_name = _slots(optimizer, [shard.variable for shard in self._shards])
        _copy_common(plain, optimizer)
        place = {id(variable): index for index, variable in enumerate(variables)}
        for name, slots in slots_by_name:
            for number, (shard, slot) in enumerate(zip(self._shards, slots, strict=True)):
                whole = self._gather(number, name, keras.ops.stop_gradient(slot.value))
                for variable, part in zip(shard.variables, shard.split(whole), strict=True):
                    getattr(plain, name)[place[id(variable)]].assign(part)
        return plain

    def adopt(self, optimizer: Any, plain: Any) -> None:
        """Take over this rank's part of the state of a plain optimizer; see `_adopt`."""
        built = list(plain._trainable_variables)
        if optimizer.built:
            _check_alike(self.sources(optimizer._trainable_variables), built)
        else:
            optimizer.build(built)
            self._awaits_own = True
        if not self._shards:
            with self.lasting_only():
                _copy_variables(optimizer, plain)
            return
        slots_by_name = _slots(optimizer, [shard.variable for shard in self._shards])
        _copy_common(optimizer, plain)
        place = {id(variable): index for index, variable in enumerate(self._variables)}
        for name, slots in slots_by_name:
            whole = getattr(plain, name)
            for shard, slot in zip(self._shards, slots, strict=True):
                values = [whole[place[id(variable)]].value for variable in shard.variables]
                slot.assign(shard.own_values(values))


def _check_alike(own: Sequence[Any], adopted: Sequence[Any]) -> None:
    """Raise `ValueError` unless state of the adopted variables fits to those of the optimizer."""
    if len(own) != len(adopted):
        raise ValueError(
            "shard_state=True: the optimizer that was given to adopt() has state of "
            f"{len(adopted)} variables, and the model has {len(own)}: give one of the same model"
        )
    for ours, theirs in zip(own, adopted, strict=True):
        if (tuple(ours.shape), ours.dtype) != (tuple(theirs.shape), theirs.dtype):
            raise ValueError(
                "shard_state=True: the optimizer that was given to adopt() has state of "
                f"{theirs.path}, {theirs.dtype}{tuple(theirs.shape)}, in the place of {ours.path}, "
                f"{ours.dtype}{tuple(ours.shape)}: give one of the same model"
            )


def _copy_variables(to: Any, source: Any) -> None:
    for own, other in zip(to.variables, source.variables, strict=True):
        own.assign(other)


def _copy_common(to: Any, source: Any) -> None:
    """Copy what is one for all elements: the learning rate, counts of steps, Nadam's product."""
    for name, value in vars(source).items():
        if _is_state(value) and not len(value.shape):
            getattr(to, name).assign(value)


def _slots(optimizer: Any, shards: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the lists of state of an optimizer, which have a variable for each shard.

    Raises `ValueError` for state that is neither that nor one number: nobody knows how it is cut.
    """
    found = []
    for name, value in vars(optimizer).items():
        variables = [value] if _is_state(value) else value if isinstance(value, list) else []
        if name in ("_trainable_variables", "_variables") or not any(map(_is_state, variables)):
            continue
        shapes = [tuple(each.shape) for each in variables if _is_state(each)]
        if isinstance(value, list) and shapes == [tuple(each.shape) for each in shards]:
            found.append((name, value))
        elif isinstance(value, list) or shapes != [()]:
            raise ValueError(
                f"{type(optimizer).__name__} has {name!r} of the shapes {shapes}, which is neither "
                "one number nor a variable for each shard, and would be lost: leave shard_state out"
            )
    return found


def _is_state(value: Any) -> bool:
    return hasattr(value, "assign") and hasattr(value, "shape")


def _dense(gradient: Any, reduction: Any) -> Any:
    """Return a dense gradient. Raises `TypeError` for a sparse one, unless it may become dense."""
    # Tensors of torch say so; those of TensorFlow that are sparse are `tf.IndexedSlices`.
    if not getattr(gradient, "is_sparse", type(gradient).__name__ == "IndexedSlices"):
        return gradient
    if not reduction.sparse_as_dense:
        raise TypeError(
            "shard_state=True: a gradient is sparse, and a flat shard is dense: give "
            "sparse_as_dense=True"
        )
    if hasattr(gradient, "to_dense"):
        return gradient.to_dense()
    return keras.ops.convert_to_tensor(gradient)
