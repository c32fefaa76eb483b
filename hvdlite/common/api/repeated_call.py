"""Calls on one tensor in place that come again in each step: one object serves all of them."""

from __future__ import annotations

from typing import Generic, TypeVar

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.tensor_entries import PlacedEntry, PreparedCall
from hvdlite.common.plain.adapter import Adapter
from hvdlite.common.runtime.runtime import Runtime

T = TypeVar("T")


class RepeatedCall(Generic[T]):
    """The operation behind a user's handle. Its entry is renewed when the name comes again.

    While nobody uses it, it lies in `Runtime.repeated` under its name, until calls are forgotten.
    """

    __slots__ = ("_adapter", "_call", "_entry", "_kept", "_name")

    def __init__(
        self,
        kept: dict[str, RepeatedCall[T]],
        adapter: Adapter[T],
        name: str,
        call: PreparedCall,
        entry: PlacedEntry[T],
    ) -> None:
        # `Runtime.repeated` as it was when the call was made: another one once calls are forgotten.
        self._kept = kept
        self._adapter = adapter
        self._name = name
        self._call = call
        self._entry = entry

    @classmethod
    def start(
        cls,
        runtime: Runtime,
        adapter: Adapter[T],
        name: str,
        tensor: T,
        options: CallOptions,
        *,
        waits: bool = False,
    ) -> RepeatedCall[T] | None:
        """Enqueue a tensor in place, if it is like that of the last call under its name.

        `waits` says that the calling thread waits for it next. None for the first call, and
        for one that has other options, or a tensor of another kind.
        """
        known: RepeatedCall[T] | None = runtime.repeated.pop(name, None)
        call = runtime.requests.get(name) if known is None else known._call
        if type(call) is not PreparedCall or call.options is not options:
            return None
        place = adapter.place(tensor, call.spec)
        if place is None:
            return None
        if known is not None and known._adapter is adapter:
            entry = known._entry
            entry.handle.renew()
            entry.renew(tensor, place, entry.handle)
        else:
            entry = PlacedEntry(call, adapter, tensor, place)
            known = cls(runtime.repeated, adapter, name, call, entry)
        runtime.engine.enqueue((entry,), waits=waits)
        return known

    def poll(self) -> bool:
        """Return whether the tensor is reduced, or the call has failed."""
        return self._entry.handle.poll()

    def wait(self) -> T:
        """Sleep until the tensor is reduced; return it, or raise the error."""
        entry = self._entry
        entry.handle.wait()
        tensor = entry.result
        assert tensor is not None
        self._adapter.finish(tensor)
        entry.release()
        self._kept[self._name] = self
        return tensor
