"""The loop of elastic training: run a function, and again from the last commit after a change.

A failure of the world returns the state to its last commit; an interrupt, raised on all ranks at
the same point when hosts come or go, keeps the current values. Then the next world is joined. The
world says who lacks its newest commit, and only these ranks receive anything: no rank decides by
its own exception whether it takes part in a sync, as ranks may have seen different ones.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from hvdlite.common.api.objects import GatherByRank
from hvdlite.common.base.errors import DEPARTED, HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.common.elastic.notification import notification_manager
from hvdlite.common.elastic.source import source_of
from hvdlite.common.elastic.state import State
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.current import find
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.tensors.comparison import compare

R = TypeVar("R")
IsLoss = Callable[[Exception], bool]

# The epoch for which each runtime has settled whether there is anything to sync.
_settled: weakref.WeakKeyDictionary[Runtime, int] = weakref.WeakKeyDictionary()


def is_loss(error: Exception) -> bool:
    """Return whether an error means that the world is over, and not that the script is wrong.

    Ranks that disagree about a tensor will do so again after each reset, so that leaves the loop.
    Where a rank has departed, the next world is for those who stay.
    """
    if not isinstance(error, HorovodInternalError):
        return False
    return not error.job_goes_on or (worlds.elastic() and DEPARTED in str(error))


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Return `func` as elastic training runs it: ``func(state, *args, **kwargs)``.

    After a change of the job's ranks the function is called again, with the state that all of them
    share. What it returns is returned, and errors of the script are raised.
    """
    return run_until(func, is_loss)


def run_until(func: Callable[..., R], is_loss: IsLoss) -> Callable[..., R]:
    """Return `func` as `run` does; `is_loss` tells errors of a world from those of the script."""
    return _decorate(func, lambda held: worlds.next_world(held()), is_loss)


def run_fn(func: Callable[..., R], reset: Callable[[], Any]) -> Callable[..., R]:
    """Return `func` as `run` does; without a driver, `reset` joins the next world.

    With one, ranks join worlds with the numbers of their commits, so `reset` is not called.
    """

    def join(held: Callable[[], int]) -> None:
        if worlds.elastic():
            worlds.next_world(held())
        else:
            reset()

    return _decorate(func, join, is_loss, own_reset=True)


def _decorate(
    func: Callable[..., R],
    reset: Callable[[Callable[[], int]], Any],
    is_loss: IsLoss,
    own_reset: bool = False,
) -> Callable[..., R]:
    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> R:
        loop = _Loop(state, reset, is_loss, own_reset)
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            return loop.run(lambda: func(state, *args, **kwargs))
        finally:
            notification_manager.remove_listener(state)

    return wrapper


class _Loop:
    """One call of a function under elastic training."""

    def __init__(
        self,
        state: Any,
        reset: Callable[[Callable[[], int]], Any],
        is_loss: IsLoss,
        own_reset: bool,
    ) -> None:
        if worlds.elastic() and not isinstance(state, State):
            raise TypeError(
                f"elastic training needs a state such as TorchState as the first argument of the "
                f"function, not a {type(state).__name__}"
            )
        self._state, self._reset, self._is_loss = state, reset, is_loss
        self._own_reset = own_reset
        # Whether the function's state is kept as it is by a job without a driver.
        self._skip_sync = False

    def run(self, func: Callable[[], R]) -> R:
        """Return what `func` returns; call it again after each change."""
        if isinstance(self._state, State):
            self._state._begin()
        joins = worlds.elastic() and worlds.current_world() is None
        while True:
            if joins:
                self._reset(self._held_commit)
            try:
                try:
                    if joins:
                        self._state.on_reset()
                    self._sync()
                    return func()
                except HostsUpdatedInterrupt as interrupt:
                    self._keep_values(interrupt)  # By a collective, where a state is divided.
            except Exception as error:
                if not self._is_loss(error) or self._is_final():
                    raise
                if DEPARTED not in str(error):  # Else another rank has left first.
                    worlds.tell_error(error)
                self._state.restore()
                self._skip_sync = False
            joins = True

    def _held_commit(self) -> int:
        state = self._state
        return state._held_commit() if isinstance(state, State) else 0

    def _is_final(self) -> bool:
        """Return whether there can be no next world: a rank is lost, and no driver replaces it."""
        return not self._own_reset and not worlds.elastic() and worlds.world_is_broken()

    def _keep_values(self, interrupt: HostsUpdatedInterrupt) -> None:
        """Make the current values those that are synced and gone back to: all of them or none."""
        self._skip_sync = interrupt.skip_sync
        if isinstance(self._state, State) and not interrupt.values_are_saved:
            self._state.save()

    def _sync(self) -> None:
        if not worlds.elastic():
            if not self._skip_sync:
                self._state.sync()
        else:
            self._sync_in_world()
        if not isinstance(self._state, State):
            return
        self._state._settle()
        runtime = find()
        if runtime is not None and runtime.config.elastic_check:
            compare(
                [*self._state._tensors_to_compare()], "the state after the reset is not the same",
                "Call commit() at the same points on all ranks, and change weights alike on all",
                GatherByRank("elastic.check"),
            )  # fmt: skip

    def _sync_in_world(self) -> None:
        """Sync if the world says so, or if the world has been entered with another call before."""
        world, runtime, state = worlds.current_world(), find(), self._state
        if world is None or runtime is None:
            raise HorovodInternalError("the world of this rank is over")
        held = state._commit_number
        try:
            if _settled.get(runtime) == world.epoch:
                state.sync()
                held = max(held, state._first_commit) + 1
            elif world.behind:
                with source_of(world):
                    state.sync()
                    # All of it is here, whatever becomes of those who took part.
                    held = max(world.commit, state._first_commit)
            else:  # All ranks have the same commit, or this one is alone with what it begins with.
                held = max(held, state._first_commit)
            _settled[runtime] = world.epoch
        finally:
            state._commit_number = held
