"""Exceptions that are both hvdlite's and TensorFlow's, so that either can be caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.util import tf_stack

from hvdlite.common.base import errors
from hvdlite.common.base.errors import DEPARTED, HorovodInternalError
from hvdlite.common.base.user_frames import OWN_FOLDER
from hvdlite.common.elastic.run import is_loss
from hvdlite.common.runtime import worlds

F = TypeVar("F", bound=Callable[..., Any])


class FailedPreconditionError(tf.errors.FailedPreconditionError, HorovodInternalError):
    """Ranks disagree about a collective, which has failed on all of them; the job goes on."""


class UnknownError(tf.errors.UnknownError, HorovodInternalError):
    """A rank was lost, or hvdlite has been shut down. ``rank`` is the global rank at fault."""


class InvalidArgumentError(tf.errors.InvalidArgumentError, ValueError):
    """An argument is wrong, whatever other ranks do."""


class UnsupportedError(InvalidArgumentError, NotImplementedError):
    """A combination of arguments that no release has."""


GENERATED = "<compiled operations of hvdlite>"  # the file of their Python functions


class WithoutOwnFrames(tf_stack.StackTraceFilter):
    """A context in which operations are made: TensorFlow says that the user's line has made them.

    It says so where one fails: "Detected at node ... defined at (most recent call last)".
    """

    def get_filtered_filenames(self) -> frozenset[str]:
        """Return the files whose frames are left out."""
        return _own_files()


@cache
def _own_files() -> frozenset[str]:
    return frozenset((*map(str, Path(OWN_FOLDER).rglob("*.py")), GENERATED))


@contextmanager
def as_tensorflow_errors() -> Iterator[None]:
    """Raise hvdlite's exceptions as TensorFlow's within this context."""
    try:
        yield
    except tf.errors.OpError:
        raise
    except HorovodInternalError as error:
        kind: Any = FailedPreconditionError if error.job_goes_on else UnknownError
        failure = kind(None, None, str(error))
        failure.rank, failure.job_goes_on = error.rank, error.job_goes_on
        raise failure from None
    except ValueError as error:
        unsupported = isinstance(error, errors.UnsupportedError)
        wrong: Any = UnsupportedError if unsupported else InvalidArgumentError
        raise wrong(None, None, str(error)) from None


# AutoGraph neither rewrites the function nor those that it calls: ours need no rewriting, and of
# those that it cannot rewrite it would warn the user.
unconverted: Any = tf.autograph.experimental.do_not_convert


def public(function: F) -> F:
    """Make a public function: it raises TensorFlow's errors, and AutoGraph leaves it alone."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with as_tensorflow_errors():
            return function(*args, **kwargs)

    left_alone: F = unconverted(call)
    return left_alone


def is_loss_in_tensorflow(error: Exception) -> bool:
    """Return whether an error means that the world is over, and not that the script is wrong.

    An operation in a graph fails with an error of TensorFlow that is none of ours; whether a rank
    was lost is then what the engine knows, whatever the text says.
    """
    if not isinstance(error, tf.errors.OpError):
        return is_loss(error)
    return worlds.world_is_broken() or (worlds.elastic() and DEPARTED in str(error))
