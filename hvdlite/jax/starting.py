"""Collectives that start on arrays of the host, and what is to be done when they have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.common.api.prepared_bucket import start_bucket
from hvdlite.common.api.submit import Operation, Signal, start
from hvdlite.common.gradients.background_exchange import BackgroundExchange
from hvdlite.common.gradients.compressed_bucket import Part
from hvdlite.common.requests.handles import Handle
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.tensors.numpy_adapter import Array, NumpyAdapter
from hvdlite.jax.calls import Call

ADAPTER = NumpyAdapter()


class Started(NamedTuple):
    """A collective on its way: the handles of its parts."""

    handles: Sequence[Handle]
    end: Callable[[], None] = lambda: None  # when all have ended well; raises what is wrong with it
    release: Callable[[], None] = lambda: None  # before that, and when one has failed, too

    def close(self) -> Exception | None:
        """Do what is left to do when all handles have ended; return the error, or None."""
        self.release()
        try:
            for handle in self.handles:
                handle.wait()  # A copy of its error: one may fail several.
            self.end()
        except Exception as error:
            return error
        return None

    def ended(self) -> Exception | None:
        """Sleep until it has ended; return its error, or None."""
        for handle in self.handles:
            handle.ended_within(threading.TIMEOUT_MAX)
        return self.close()


class _Results(NumpyAdapter):
    """An adapter that gives the memory of a program to the results of a collective."""

    def __init__(self, inputs: Sequence[Array], results: Sequence[Array]) -> None:
        self._inputs, self._results = inputs, results

    def empty_like(self, tensor: Array, shape: tuple[int, ...]) -> Array:
        number = next(i for i, array in enumerate(self._inputs) if array is tensor)
        result = self._results[number]
        # One of another shape is made for nothing: it fails when it is there.
        return result if result.shape == shape else super().empty_like(tensor, shape)


def start_now(call: Call, inputs: Sequence[Array], results: Sequence[Array]) -> Started:
    """Start a collective that reads `inputs` and writes `results`, which may be the same arrays."""
    runtime, options = for_collective(), call.options
    if call.is_signal:
        signal = Signal(
            call.collective, options.process_set, runtime, name=call.name, settings=options.settings
        )

        def tell() -> None:
            results[0][...] = signal.wait()

        return Started([signal.handle], tell)
    if call.exchange is not None:
        return _start_compressed(call, call.exchange, inputs, results, runtime)
    if call.names:
        bucket = start_bucket(runtime, ADAPTER, call.names, results, options)
        return Started([bucket.handle], release=bucket.release)
    if call.keeps_shape:
        entries = start(runtime, ADAPTER, call.collective, call.name, inputs, options, results)
        return Started([entry.handle for entry in entries])
    return _start_gather(call, inputs, results, runtime)


def _start_gather(
    call: Call, inputs: Sequence[Array], results: Sequence[Array], runtime: Runtime
) -> Started:
    """Start a collective whose results have shapes that the other ranks decide, too."""
    inputs = [array.view() for array in inputs]  # Each is known by its object, even if given twice.
    adapter = _Results(inputs, results)
    entries = start(runtime, adapter, call.collective, call.name, inputs, call.options)

    def check() -> None:
        arrays = Operation(entries).wait_for_tensors()
        for array, result in zip(arrays, results, strict=True):
            if array.shape != result.shape:
                raise ValueError(
                    f"{call.collective} '{call.name}': this program was compiled for a result of "
                    f"the shape {list(result.shape)}, and it has {list(array.shape)}: inside "
                    "jax.jit all ranks must give as many rows"
                )

    return Started([entry.handle for entry in entries], check)


def _start_compressed(
    call: Call, exchange: BackgroundExchange, inputs: Sequence[Array], results: Sequence[Array],
    runtime: Runtime,
) -> Started:  # fmt: skip
    copies = [np.array(array.reshape(-1), np.float32) for array in inputs]
    parts = [
        Part(name, copy, array.shape)
        for name, copy, array in zip(call.names, copies, inputs, strict=True)
    ]
    first = call.names[0], inputs[0].shape, inputs[0].dtype.name
    handle = exchange.submit(parts, runtime, first)

    def give() -> None:
        for copy, result in zip(copies, results, strict=True):
            result[...] = copy.reshape(result.shape)

    return Started([handle], give)
