"""Loaders that need no framework: a base class, and a mixin that loads ahead in a thread.

class Images(BaseDataLoader):
    def __len__(self): ...
    def _iterate(self): ...  # yields batches

class ImagesAhead(AsyncDataLoaderMixin, Images):
    pass

for batch in ImagesAhead(async_loader_queue_size=8): ...
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import TYPE_CHECKING, Any

_PATIENCE = 2.0  # seconds that the end of the process waits for a batch that is being loaded


class BaseDataLoader:
    """What a loader consists of; a subclass gives at least `_iterate`."""

    def __len__(self) -> int:
        """Return the number of batches of one iteration."""
        raise NotImplementedError(f"{type(self).__name__} does not define __len__")

    def _iterate(self) -> Iterable[Any]:
        """Yield the batches of one iteration, from the first; called anew for each."""
        raise NotImplementedError(f"{type(self).__name__} does not define _iterate")

    def __iter__(self) -> Iterator[Any]:
        """Batch by batch what `_iterate` gives, through `_process_batch`."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Return what the loop gets for a batch: the batch, unless a subclass says otherwise."""
        return batch


if TYPE_CHECKING:
    _Mixed = BaseDataLoader
else:  # whatever class has the methods; deriving from the base would hide those of other classes
    _Mixed = object


class AsyncDataLoaderMixin(_Mixed):
    """Runs `_iterate` in a thread, ahead of the loop; comes first among the bases of a loader.

    `_process_batch` stays in the thread of the loop. Every iteration has a thread of its own, which
    ends with it: also when the loop is left early or its iterator is garbage. What `_iterate`
    raises is raised in the loop, after the batches that came before.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """At most `async_loader_queue_size` batches wait for the loop; 0 means without a thread.

        `debug_data_loader` writes to standard error how many are ready when the loop takes one. All
        other arguments are for the next base. Raises `ValueError` for a negative size.
        """
        if async_loader_queue_size < 0:
            raise ValueError(
                f"async_loader_queue_size={async_loader_queue_size} is negative: "
                "give the number of batches to load ahead, or 0 to load without a thread"
            )
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._workers = _Workers()
        self._own_workers()
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """As without the mixin, but loaded ahead."""
        for batch in self._ahead() if self.async_loader_queue_size else self._iterate():
            yield self._process_batch(batch)

    def close_async_loader(self) -> None:
        """End all iterations that are going on and wait for their threads.

        A thread ends as soon as the batch that it is loading is complete; loops over this loader
        end without an error. A later iteration begins anew.
        """
        _end_all(self._own_workers())

    def _own_workers(self) -> _Workers:
        if self._workers.loader() is not self:  # They are nobody's, or of a copied loader.
            self._workers = _Workers()
            self._workers.loader = weakref.ref(self)
            # At exit, too: a thread that is cut off amid compiled code can take the process down.
            weakref.finalize(self, _end_all, self._workers, _PATIENCE)
        return self._workers

    def _ahead(self) -> Iterator[Any]:
        worker = _Worker(self._iterate, self.async_loader_queue_size, self._own_workers())
        try:
            worker.thread.start()
            for number, batch in enumerate(worker):
                if self.debug_data_loader:
                    line = f"{type(self).__name__}: batch {number}, {worker.ready()} more are ready"
                    sys.stderr.write(line + "\n")
                yield batch
        finally:  # no join: this may run in a finaliser, whose thread may hold what _iterate needs
            worker.stop()


class _End:
    """Comes after the last batch: the iteration is over, by an error or without."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Worker:
    """A thread that loads batches, and the line in which they wait for the loop.

    `stop` may run in a finaliser, that is in any thread and amid any other call here. Hence no
    locks and no bounded queue: `SimpleQueue.put` is made for that.
    """

    def __init__(self, iterate: _Source, size: int, workers: _Workers) -> None:
        self.thread = Thread(
            target=self._run, args=(iterate, size, workers), name="hvdlite-data-loader", daemon=True
        )
        self._line: SimpleQueue[Any] = SimpleQueue()
        self._taken: SimpleQueue[None] = SimpleQueue()  # one entry for each batch that was taken
        self._stopped = False

    def ready(self) -> int:
        """How many batches wait."""
        return self._line.qsize()

    def stop(self) -> None:
        """Have both sides end: the thread after the batch that it is loading, the loop at once."""
        self._stopped = True
        self._taken.put(None)
        self._line.put(_End())

    def __iter__(self) -> Iterator[Any]:
        while not self._stopped:
            item = self._line.get()
            if isinstance(item, _End):
                self._finish(item.error)
                return
            self._taken.put(None)
            yield item

    def _finish(self, error: BaseException | None) -> None:
        if not self._stopped:
            self.thread.join()  # it has nothing left to do
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame

    def _run(self, iterate: _Source, size: int, workers: _Workers) -> None:
        try:
            # Before anything is loaded: whoever sees that loading has begun can end it.
            for thread in list(workers):
                if not thread.is_alive():
                    workers.pop(thread, None)
            workers[self.thread] = weakref.ref(self)
            free = size
            for batch in iterate():
                self._line.put(batch)
                del batch  # the loop may be done with it before the next one is there
                free -= 1
                if not free:
                    self._taken.get()
                    free += 1
                if self._stopped:
                    break
        except BaseException as error:  # also SystemExit: the loop would wait forever
            self._line.put(_End(error))
        else:
            self._line.put(_End())


_Source = Callable[[], Iterable[Any]]


class _Workers(dict[Thread, "weakref.ref[_Worker]"]):
    """The threads of one loader; with a loader that is copied or pickled, none go along."""

    loader: Callable[[], AsyncDataLoaderMixin | None] = staticmethod(lambda: None)

    def __reduce__(self) -> Any:
        return _Workers, ()


def _end_all(workers: _Workers, patience: float | None = None) -> None:
    """Stop all `workers`, then wait for each: `patience` in seconds, None is without limit."""
    for reference in list(workers.values()):
        worker = reference()
        if worker is not None:  # else nobody is left who could wait
            worker.stop()
    for thread in list(workers):
        if thread is not current_thread():
            thread.join(patience)
        workers.pop(thread, None)


__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
