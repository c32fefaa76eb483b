"""The order of programs, and the wait for those that still run.

JAX hands a token from each program with collectives to the next one that the same thread starts,
and goes on with the script while they run. What is not public in JAX is used here, and in
programs.py, only: effects, and the tokens of programs.
"""

from __future__ import annotations

import atexit
import threading
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax._src import dispatch, effects

from hvdlite.common.base.report_failure import reason_of_end
from hvdlite.jax.native.executions import forget_all


class CollectiveEffect(effects.Effect):
    """Other ranks see it: it is never removed, doubled, or moved before another one."""

    def __str__(self) -> str:
        return "Collective"


EFFECT = CollectiveEffect()
for _allowed in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(CollectiveEffect)


def wait_for_programs() -> None:
    """Wait until all programs have ended that this thread has started.

    Their errors are raised where their results are used.
    """
    tokens = dispatch.runtime_tokens
    for token in [*tokens.current_tokens.values(), *tokens.output_runtime_tokens.values()]:
        with suppress(jax.errors.JaxRuntimeError):
            token.block_until_ready()
    tokens.clear()


def wait_for_all_programs() -> None:
    """Wait as `wait_for_programs` does, for the programs of other threads of this rank, too."""
    wait_for_programs()
    with _tokens_lock:
        of_threads = [*_tokens_of_threads.values()]
    for tokens in of_threads:
        token = tokens.get(EFFECT)
        if token is not None:
            with suppress(jax.errors.JaxRuntimeError):
                token.block_until_ready()


def forget_programs() -> None:
    """Have all programs compiled anew: those of a world contain places and numbers of ranks."""
    wait_for_programs()
    jax.clear_caches()
    forget_all()


def end_before_exit() -> None:
    """Let programs end before this rank departs at the exit of the process."""
    atexit.unregister(_at_exit)  # What is registered last is called first.
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Wait for programs, unless the script has failed: other ranks then learn that at once."""
    if not reason_of_end():
        wait_for_programs()


# The tokens of each thread that has started a program; JAX gives a thread its own alone.
_tokens_of_threads: WeakKeyDictionary[threading.Thread, dict[Any, Any]] = WeakKeyDictionary()
_tokens_lock = threading.Lock()
_token_of_last = dispatch.RuntimeTokenSet.get_token_input


def _token_of_last_good(tokens: Any, effect: Any, *devices: Any) -> Any:
    """Return the token of the last program: a new one if that has failed.

    JAX would fail every program that follows with the error of the first.
    """
    if effect is EFFECT:
        token = tokens.current_tokens.get(EFFECT)
        if token is not None and token._buf.is_ready():
            try:
                token.block_until_ready()
            except jax.errors.JaxRuntimeError:
                del tokens.current_tokens[EFFECT]
        with _tokens_lock:
            _tokens_of_threads[threading.current_thread()] = tokens.current_tokens
    return _token_of_last(tokens, effect, *devices)


dispatch.RuntimeTokenSet.get_token_input = _token_of_last_good
