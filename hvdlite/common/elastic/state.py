"""States: what a rank goes back to after a failure, and what newcomers receive.

A commit is a saved state. Commits are numbered, so that after a failure the ranks that hold the
newest one are found without comparing weights. A state has no number (0) until its first sync: a
rank whose state nobody has agreed on must never be the source for others.
"""

from __future__ import annotations

import copy
import functools
import queue
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvdlite.common.api.objects import broadcast_object
from hvdlite.common.base.errors import HostsUpdatedInterrupt
from hvdlite.common.base.host_update import HostUpdateResult
from hvdlite.common.elastic.source import RANK_0, sync_source
from hvdlite.common.runtime import worlds
from hvdlite.common.tensors.comparison import Compared

# Nested dicts, lists and tuples: how state is made of its parts.


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the tree with each leaf replaced by ``change(leaf)``; containers are new ones.

    Containers keep their classes and attributes. Leaves come in the order of the containers.
    """
    if isinstance(tree, dict):
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = map_leaves(value, change)
        return mapped
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[map_leaves(value, change) for value in tree])
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_leaves(value, change) for value in tree])
    return change(tree)


def named_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return all leaves with names that say where they are: ``name.key.0``."""
    if isinstance(tree, dict):
        children = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        children = list(enumerate(tree))
    else:
        return [(name, tree)]
    return [leaf for key, child in children for leaf in named_leaves(child, f"{name}.{key}")]


Broadcast = Callable[[Any], Any]
GetRank = Callable[[], int]


class State:
    """The base of all states; a subclass defines `save`, `restore` and `sync`.

    `bcast_object` returns the Python object of rank 0 on every rank; `get_rank` returns this rank.
    """

    # The number of the first commit, which all ranks hold after the first sync.
    _first_commit = 1
    # The number of the commit that is held here; 0 before the first sync.
    _commit_number = 0
    # Whether `save`, of this class or of one above it, is running.
    _saving = False
    # Whether `commit` is calling `check_host_updates`: the current values are saved.
    _in_commit = False

    def __init__(self, bcast_object: Broadcast, get_rank: GetRank) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._last_updated_timestamp = 0
        self._host_messages: queue.Queue[tuple[int, HostUpdateResult]] = queue.Queue()
        self._reset_callbacks: list[Callable[[], Any]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        """Count the saves of each subclass, however it saves."""
        super().__init_subclass__(**options)
        if "save" in vars(cls):
            cls.save = _counted(cls.save)  # type: ignore[assignment,method-assign]

    def save(self) -> None:
        """Copy the current values to host memory."""
        raise NotImplementedError(f"{type(self).__name__} does not define save()")

    def restore(self) -> None:
        """Go back to the last save: undo all changes since."""
        raise NotImplementedError(f"{type(self).__name__} does not define restore()")

    def sync(self) -> None:
        """Make all ranks equal to the root; every rank calls it.

        The root is rank 0; in an elastic job, the first rank with the newest commit."""
        raise NotImplementedError(f"{type(self).__name__} does not define sync()")

    def commit(self) -> None:
        """Save, and look for changes of the hosts as `check_host_updates` does."""
        self.save()
        self._in_commit = True
        try:
            self.check_host_updates()
        finally:
            self._in_commit = False

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks at the same point if the hosts have changed.

        Every rank makes this call equally often. Under a driver it exchanges no message unless
        there is news; without one it broadcasts what rank 0 has heard.
        """
        before = newest = self._last_updated_timestamp
        kinds = HostUpdateResult.no_update  # Of all that is new.
        while not self._host_messages.empty():
            timestamp, heard = self._host_messages.get()
            if timestamp > before:
                newest = max(newest, timestamp)
                kinds |= heard
        if worlds.elastic():
            self._last_updated_timestamp = newest
            kind = worlds.check()
            if kind is not None:
                self._interrupt(kind)
            return
        before, newest, kinds = self._bcast_object((before, newest, kinds))
        self._last_updated_timestamp = newest
        if newest > before:
            self._interrupt(kinds)

    def _interrupt(self, kinds: int) -> None:
        interrupt = HostsUpdatedInterrupt(skip_sync=kinds == HostUpdateResult.removed)
        interrupt.values_are_saved = self._in_commit
        raise interrupt

    def on_hosts_updated(self, timestamp: int, update_res: HostUpdateResult) -> None:
        """Take news of the hosts; called in another thread."""
        self._host_messages.put((timestamp, update_res))

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call these functions, without arguments, in each reset: the new world is there then.

        They run on every rank, in order, before `sync`: size and rank are new, weights are not
        equal yet.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Begin in a new world: call `reset`, then the reset callbacks."""
        self._host_messages = queue.Queue()
        self._enter_world()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Do nothing; a hook for subclasses, called in each reset before the callbacks."""

    # -- for the elastic loop and for the states of frameworks

    def _begin(self) -> None:
        """Save what has changed since the state was made, such as a checkpoint that was loaded."""
        self.save()

    def _settle(self) -> None:
        """Take note that all ranks of a world agree about the state."""

    def _enter_world(self) -> None:
        """Adapt to the size of a new world what depends on it."""

    def _held_commit(self) -> int:
        """Return the number of the commit that this rank could go on from, 0 for none."""
        return self._commit_number

    def _tensors_to_compare(self) -> Iterable[Compared]:
        """Yield what is equal on all ranks, bit by bit."""
        return ()


def _counted(save: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a `save` that gives a new number to the commit, unless it is a part of another."""

    @functools.wraps(save)
    def counted(self: Any) -> None:
        if self._saving:
            save(self)
            return
        self._saving = True
        try:
            save(self)
        finally:
            self._saving = False
        if self._commit_number:
            self._commit_number += 1

    return counted


class ObjectState(State):
    """A state of plain Python objects: each keyword becomes an attribute that is tracked.

    `save` copies values (``copy.deepcopy``), so that one changed in place is restored, too.
    Attributes that are set later are not tracked. Raises `ValueError` for a keyword that is the
    name of a method, and `TypeError` for a value that cannot be copied.
    """

    def __init__(self, bcast_object: Broadcast, get_rank: GetRank, **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        check_names(type(self), kwargs)
        self._saved_state: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = self._copies(kwargs)

    def save(self) -> None:
        """Copy the current values of all tracked attributes."""
        self._saved_state = self._copies({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Set all tracked attributes to copies of what was saved last."""
        self._set_attributes(self._copies(self._saved_state))

    def sync(self) -> None:
        """Give all ranks what the root saved last: as their attributes, and as their last save."""
        if not self._saved_state:
            return
        self._saved_state = self._attributes_from_source()
        self._set_attributes(self._copies(self._saved_state))

    def _attributes_from_source(self) -> Any:
        """Return what the sync's root saved last. Raises `ValueError` for that of another state."""
        found = self._from_source(self._saved_state)
        if found.keys() != self._saved_state.keys():
            here, there = (", ".join(sorted(each)) for each in (self._saved_state, found))
            raise ValueError(
                f"the state has the attributes {here} on rank {self._rank()}, and {there} on the "
                "rank that gives it: let all ranks make the same state. A worker that comes later "
                "begins with the first elastic function of the script, so a job has one at a time"
            )
        return found

    def _from_source(self, obj: Any) -> Any:
        """Return the object of the sync's root, on the ranks that take part."""
        source = sync_source()
        if source == RANK_0:
            return self._bcast_object(obj)
        if not source.takes_part:
            return obj
        return broadcast_object(obj, source.root_rank, process_set=source.process_set)

    def _set_attributes(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _copies(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Copy all values at once: objects that share a part still do. Raises `TypeError`."""
        if all(type(value) in _PLAIN for value in values.values()):
            return dict(values)
        try:
            return copy.deepcopy(dict(values))
        except Exception:
            for name, value in values.items():
                _copied(name, value)
            raise


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})  # Which nobody changes.


def _copied(name: str, value: Any) -> Any:
    """Return a deep copy. Raises `TypeError`, which names the attribute."""
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise TypeError(
            f"the state's attribute {name!r} is a {type(value).__name__}, which cannot be copied "
            f"({error}): keep it outside of the state, or give it state_dict() and "
            "load_state_dict()"
        ) from error


def check_names(cls: type[State], names: Iterable[str]) -> None:
    """Raise `ValueError` if one of the names of attributes is that of a method of the class."""
    for name in names:
        if callable(getattr(cls, name, None)):
            raise ValueError(
                f"a state has a method {name}(), so an attribute cannot have this name: give it "
                "another one"
            )
