"""Optimizers of `tf.compat.v1.train` whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.weights_check import VariablesCheck
from hvdlite.tf.errors import unconverted
from hvdlite.tf.optimizer.aggregation import Accumulator, Passes, local_variable
from hvdlite.tf.optimizer.gradient_exchange import Gradient, Reducer, wrap
from hvdlite.tf.variables import compare_variables, key_of


class ReducedCheck:
    """A check that gradients about to be applied have been reduced over all ranks.

    They may have been clipped or scaled meanwhile. In a graph the check asks whether they were
    computed from reduced gradients; eagerly, whether the gradients of their variables were reduced
    since the last step.
    """

    def __init__(self) -> None:
        # In the graph, it lives as long as the tensors.
        self._collection = f"hvdlite_reduced/{id(self)}"
        self._fresh: dict[int, Any] = {}

    def note(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Remember the reduced gradients of the variables."""
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                continue
            if tf.executing_eagerly():
                self._fresh[key_of(variable)] = variable
            else:
                graph = tf.compat.v1.get_default_graph()
                graph.add_to_collection(self._collection, _tensor(gradient).name)

    def foreign(self, pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Return the variables of the pairs whose gradients are of this rank alone."""
        return [
            variable
            for gradient, variable in pairs
            if gradient is not None and not self._is_reduced(gradient, variable)
        ]

    def forget(self, variables: Iterable[Any]) -> None:
        """Forget the gradients of these variables, with which a step was made."""
        for variable in variables:
            self._fresh.pop(key_of(variable), None)

    def _is_reduced(self, gradient: Any, variable: Any) -> bool:
        if tf.executing_eagerly():
            return key_of(variable) in self._fresh
        tensor = _tensor(gradient)
        if not tf.is_symbolic_tensor(tensor):  # The user has put a constant there.
            return False
        seen: set[tuple[int, str]] = set()
        pending = [tensor]
        while pending:
            tensor = pending.pop()
            key = (id(tensor.graph), tensor.name)
            if key in seen:
                continue
            seen.add(key)
            if tensor.name in tensor.graph.get_collection(self._collection):
                return True
            pending += _inputs(tensor)
        return False


def _tensor(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _inputs(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return the inputs of a tensor, also those in the graph around its own."""
    outside = [
        outer
        for outer, inner in getattr(tensor.graph, "captures", ())
        if inner.name == tensor.name and tf.is_symbolic_tensor(outer)
    ]
    return outside or list(tensor.op.inputs)


Pairs = list[tuple[Gradient, Any]]


class DistributedMixin(tf.compat.v1.train.Optimizer):
    """The base class that is put before the class of the wrapped optimizer.

    Shares its attributes.
    """

    __slots__ = ("_aggregation", "_reduced_check", "_reducer", "_weights_check", "_wrapped")

    _aggregation: Accumulator | None
    _weights_check: VariablesCheck
    _reduced_check: ReducedCheck
    _reducer: Reducer

    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        """Return the wrapped optimizer's ``(gradient, variable)``, reduced over all ranks.

        Gradients may then be clipped or scaled before ``apply_gradients()``. In passes that only
        add gradients up they have no meaning, and are not applied. Raises `tf.errors.OpError` when
        a reduction fails.
        """
        pairs = super().compute_gradients(*args, **kwargs)
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        if self._aggregation is None:
            reduced = self._reducer.reduce(gradients, variables)
        else:
            reduced = self._aggregation.add(
                gradients,
                variables,
                lambda sums: self._reducer.reduce(sums, variables),
                lambda sums: sums,
            )
        self._reduced_check.note(reduced, variables)
        return list(zip(reduced, variables, strict=True))

    @unconverted
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, Any]],
        global_step: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Apply as the wrapped optimizer does, in the last pass of a step; otherwise do nothing.

        Raises `RuntimeError` for gradients that ``compute_gradients()`` has not reduced.
        """
        pairs = list(grads_and_vars)
        self._check(pairs)
        apply = super().apply_gradients

        def step(name: str | None = None) -> Any:
            applied = apply(pairs, global_step, name, **options)
            return _checked(self._weights_check, applied, pairs, self._state)

        if self._aggregation is None:
            return step(name)
        return tf.group(self._aggregation.when_due(step, tf.no_op), name=name)

    def _state(self) -> list[Any]:
        with tf.init_scope():  # It knows no variables of the graph around that of a branch.
            variables: list[Any] = self.variables()
        return variables

    def _check(self, pairs: Pairs) -> None:
        if not self._reducer.reduction.active:
            return
        is_local = self._reducer.local.pick([variable for _, variable in pairs])
        shared = [pair for pair, local in zip(pairs, is_local, strict=True) if not local]
        foreign = self._reduced_check.foreign(shared)
        if foreign:
            names = ", ".join(variable.name for variable in foreign[:3])
            raise RuntimeError(
                "apply_gradients() of a DistributedOptimizer was given gradients of this rank "
                f"alone, of {names}: the ranks' variables would drift apart. Take those that its "
                "compute_gradients() returns, in the same graph and anew for each step"
            )
        self._reduced_check.forget(variable for _, variable in shared)

    def forget_passes(self) -> None:
        """Begin the passes of a step anew, at once or in the default session."""
        if self._aggregation is not None:
            self._aggregation.forget()

    def compression_state(self) -> dict[str, Any]:
        """Return what `compression` remembers on this rank, with numpy arrays, to be pickled."""
        return self._reducer.compression_state()

    def load_compression_state(self, saved: Mapping[str, Any]) -> None:
        """Take what `compression_state` has returned on this rank of as many, or elsewhere.

        From elsewhere comes what ranks share, and not what this rank has not sent.
        """
        self._reducer.load_compression_state(saved)

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of this variable from now on: each rank has its own."""
        self._reducer.local.add(var)


class AdasumMixin(tf.compat.v1.train.Optimizer):
    """The base class that is put before the class of the wrapped optimizer; shares its attributes.

    Each pass makes a step with the gradients of this rank. What the steps since the last exchange
    have changed is then combined with what those of the other ranks have changed.
    """

    __slots__ = ("_passes", "_reducer", "_starts", "_weights_check", "_wrapped")

    _weights_check: VariablesCheck

    _passes: Passes
    _reducer: Reducer
    _starts: dict[int, tf.Variable]  # The values of variables after the last exchange.

    @unconverted
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, Any]],
        global_step: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Make the wrapped optimizer's step, and in the last pass replace it by the Adasum.

        Raises `tf.errors.OpError` when the exchange fails.
        """
        pairs = list(grads_and_vars)
        if not self._reducer.reduction.active:
            return super().apply_gradients(pairs, global_step, name, **options)
        variables = self._shared(pairs)
        starts = [self._start(variable) for variable in variables]
        number = self._passes.next()
        # A copy: an optimizer writes to the memory of a variable that is no resource.
        values = [tf.raw_ops.DeepCopy(x=variable.read_value()) for variable in variables]
        begun = self._passes.in_first(number, lambda: _assign(starts, values), tf.no_op)
        with _after(begun):
            applied = super().apply_gradients(pairs, global_step, **options)
        with _after(applied):
            began = [start.read_value() for start in starts]
            steps = [
                variable.read_value() - start
                for variable, start in zip(variables, began, strict=True)
            ]

        def exchange() -> Any:
            combined = self._reducer.reduce(steps, variables)
            ends = [start + step for start, step in zip(began, combined, strict=True)]
            return _checked(self._weights_check, _assign(variables, ends), pairs)

        ended = self._passes.in_last(number, exchange, tf.no_op)
        return None if tf.executing_eagerly() else tf.group(applied, ended, name=name)

    def _shared(self, pairs: Pairs) -> list[Any]:
        is_local = self._reducer.local.pick([variable for _, variable in pairs])
        return [
            variable
            for (gradient, variable), local in zip(pairs, is_local, strict=True)
            if gradient is not None and not local
        ]

    def _start(self, variable: Any) -> tf.Variable:
        """Return the variable that holds the value after the last exchange."""
        key = key_of(variable)
        if key not in self._starts:
            shape, dtype = variable.shape, variable.dtype.base_dtype
            self._starts[key] = local_variable(lambda: tf.zeros(shape, dtype), "adasum_start")
        return self._starts[key]

    def forget_passes(self) -> None:
        """Begin the passes of a step anew, at once or in the default session."""
        self._passes.forget()

    def register_local_var(self, var: Any) -> None:
        """Do not combine this variable from now on: each rank has its own."""
        self._reducer.local.add(var)


def _assign(variables: Sequence[Any], values: Sequence[tf.Tensor]) -> Any:
    assigned = [
        variable.assign(value, read_value=False)
        for variable, value in zip(variables, values, strict=True)
    ]
    return None if tf.executing_eagerly() else tf.group(*assigned)


def _checked(
    check: VariablesCheck, step: Any, pairs: Pairs, state: Callable[[], Sequence[Any]] = list
) -> Any:
    """Return the operation of a step, after which weights are compared where settings ask for it.

    Only those that have got gradients: ranks give them alike.
    """
    with _after(step):
        compared = check.step(
            [variable for gradient, variable in pairs if gradient is not None], state
        )
    return step if compared is None else tf.group(step, compared)


def _after(operation: Any) -> Any:
    """Order the operations made within this context after `operation`."""
    return tf.control_dependencies([] if operation is None else [operation])


def distributed(
    optimizer: tf.compat.v1.train.Optimizer,
    reducer: Reducer,
    passes: int,
    average_passes: bool,
) -> Any:
    """Return the optimizer with gradients that the reducer reduces once in `passes` passes.

    Raises `ValueError` for arguments that contradict each other.
    """
    adasum = reducer.reduction.scaling.op is ReduceOp.ADASUM
    if passes > 1 and tf.executing_eagerly():
        raise ValueError(
            "backward_passes_per_step > 1 of an optimizer of tf.compat.v1.train needs a graph: it "
            "is not possible when executing eagerly"
        )
    if adasum and average_passes:
        raise ValueError("Adasum does not support average_aggregated_gradients")
    if isinstance(optimizer, (DistributedMixin, AdasumMixin)):
        raise ValueError("this optimizer is a DistributedOptimizer already: wrap it once")
    wrapped = wrap(AdasumMixin if adasum else DistributedMixin, optimizer)
    wrapped._reducer = reducer
    wrapped._weights_check = VariablesCheck(reducer, compare_variables)
    if adasum:
        wrapped._passes, wrapped._starts = Passes(passes), {}
        return wrapped
    wrapped._reduced_check = ReducedCheck()
    wrapped._aggregation = (
        Accumulator(passes, average_passes, reducer.reduction.sparse_as_dense)
        if passes > 1
        else None
    )
    return wrapped
