"""What the workers of a soak's jobs do in each step, for each framework.

Integers are pushed, whose sum does not depend on an order: so the last values are known in any
mode. The digits, which PyTorch trains with Adam, have a serial oracle in sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.ps import context
from hvdlite.ps.context import PREFIX, serve
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler import registry
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.row_store import ZEROS, RowsSpec
from hvdlite.ps.worker.table_shards import TableShards
from hvdlite.torch import ps
from tests.ps.digits import OPTIMIZERS, batch, loss_of, network

SIZES, ROWS, LENGTH = (300, 7, 40), 50, 3
PART_BYTES = 800
LIFE_STEPS = 1_000_000  # The digits of a step are those of its life and its number.

Array = NDArray[Any]


class Plan(NamedTuple):
    """What the processes of a job do."""

    framework: str  # numpy, torch, keras or digits.
    mode: str
    staleness: int | None
    workers: int  # Without those that join.

    @property
    def apart(self) -> int | None:
        """How many steps workers may be apart; None: any number."""
        return {"sync": 0, "ssp": (self.staleness or 0) + 1}.get(self.mode)


class Training(Protocol):
    """What is trained, in one process."""

    tables: Sequence[TableShards]

    def step(self, life: int, number: int, worker: int) -> None:
        """Make a step, or what is missing of it; have the values that follow."""

    def found(self) -> Array:
        """Return the values of the servers."""


def gradients_of(life: int, step: int, worker: int) -> list[Array]:
    made = np.random.default_rng([life, step, worker])
    return [made.integers(-99, 99, size).astype(float) for size in SIZES]


def rows_of(life: int, step: int, worker: int) -> tuple[Array, Array]:
    made = np.random.default_rng([life, step, worker, 1])
    ids = made.permutation(ROWS)[:5]
    return ids, made.integers(-99, 99, (5, LENGTH)).astype(float)


class InNumpy:
    """Adds integers to a table and to rows, each of which has its own steps."""

    def __init__(self, plan: Plan) -> None:
        if context.role() == "server":
            serve()
        options = TableOptions(plan.mode, plan.staleness, average=False, part_bytes=PART_BYTES)
        specs = [TensorSpec(str(n), "float64", (size,)) for n, size in enumerate(SIZES)]
        self._values = [np.zeros(size) for size in SIZES]
        worker = context.worker()
        self._table = worker.declare(PREFIX + "t", specs, options, lambda: self._values)
        spec = RowsSpec(ROWS, LENGTH, "float64", initializer=ZEROS)
        tensor = TensorSpec(PREFIX + "rows", "float64", (ROWS, LENGTH))
        self._rows = worker.declare_rows(tensor, options._replace(rows=spec.fields))
        self.tables = self._table, self._rows
        self._table.pull(self._values)

    def step(self, life: int, number: int, worker: int) -> None:
        if self._table.clock == number:
            self._table.push(gradients_of(life, number, worker), {})
            self._table.pull(self._values)
        if self._rows.clock == number:
            self._rows.push(*rows_of(life, number, worker)).wait()
            self._rows.pull(np.arange(9)).wait()

    def found(self) -> Array:
        self._table.pull(self._values)
        rows = self._rows.pull(np.arange(ROWS)).wait()
        return np.concatenate([*self._values, rows.reshape(-1)])


class InTorch:
    """Lets servers step by SGD with the negative of integers."""

    def __init__(self, plan: Plan) -> None:
        registry.PART_BYTES = PART_BYTES
        self._weights = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in SIZES]
        named = [(str(number), weight) for number, weight in enumerate(self._weights)]
        self._optimizer = ps.DistributedOptimizer(
            torch.optim.SGD(self._weights, lr=1.0), named, plan.mode, plan.staleness,
            op=ReduceOp.SUM,
        )  # fmt: skip
        self.tables = [*context.worker().named.values()]

    def step(self, life: int, number: int, worker: int) -> None:
        for weight, gradient in zip(self._weights, gradients_of(life, number, worker), strict=True):
            weight.grad = torch.tensor(-gradient)
        self._optimizer.step()

    def found(self) -> Array:
        with torch.no_grad():
            for table in self.tables:
                table.refresh()
        return np.concatenate([weight.detach().numpy() for weight in self._weights])


class InKeras:
    """Lets servers step by SGD of Keras with the negative of integers."""

    def __init__(self, plan: Plan) -> None:
        import keras

        from hvdlite.keras import ps as keras_ps

        registry.PART_BYTES = PART_BYTES
        self._weights = [keras.Variable(np.zeros(size), dtype="float64") for size in SIZES]
        self._optimizer = keras_ps.DistributedOptimizer(
            keras.optimizers.SGD(1.0), plan.mode, plan.staleness, ReduceOp.SUM
        )
        self._optimizer.build(self._weights)
        self.tables = [*context.worker().named.values()]

    def step(self, life: int, number: int, worker: int) -> None:
        gradients = [torch.tensor(-each) for each in gradients_of(life, number, worker)]
        self._optimizer.apply(gradients, self._weights)

    def found(self) -> Array:
        for table in self.tables:
            table.refresh()
        return np.concatenate([weight.numpy() for weight in self._weights])


class OfDigits:
    """Trains the digits with Adam, in sync."""

    def __init__(self, plan: Plan) -> None:
        registry.PART_BYTES = 2048
        self._workers = plan.workers
        self._model = network()
        self._optimizer = ps.DistributedOptimizer(
            OPTIMIZERS["adam"](self._model.parameters()), self._model.named_parameters()
        )
        self.tables = [*context.worker().named.values()]

    def step(self, life: int, number: int, worker: int) -> None:
        self._optimizer.zero_grad()
        # Servers add gradients in the order of ranks, in which workers have come.
        digits = batch(life * LIFE_STEPS + number, context.rank(), self._workers)
        loss_of(self._model, *digits).backward()
        self._optimizer.step()

    def found(self) -> Array:
        return flat(self._model.state_dict())


def flat(weights: dict[str, torch.Tensor]) -> Array:
    return np.concatenate([weights[name].detach().numpy().reshape(-1) for name in sorted(weights)])


TRAININGS: dict[str, Callable[[Plan], Training]] = {
    "numpy": InNumpy, "torch": InTorch, "keras": InKeras, "digits": OfDigits,
}  # fmt: skip
