"""Loaders: the same batches with and without a thread, and no thread that stays."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvdlite.data import AsyncDataLoaderMixin, BaseDataLoader
from tests.parallel.jobs import environment

pytestmark = pytest.mark.timeout(30)


class Squares(BaseDataLoader):
    """Gives 0, 1, 2, ... and makes them squares in the thread of the loop."""

    def __init__(self, count: int = 5) -> None:
        self.count = count
        self.loaded = 0
        self.closed = threading.Event()
        self.threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        try:
            for number in range(self.count):
                self.threads.append(threading.current_thread())
                self.loaded = number + 1
                yield number
        finally:
            self.closed.set()

    def _process_batch(self, batch: int) -> int:
        assert threading.current_thread() is threading.main_thread()
        return batch * batch


class SquaresAhead(AsyncDataLoaderMixin, Squares):
    """Loads ahead."""


class Given(BaseDataLoader):
    """Gives what a function yields."""

    def __init__(self, source: Callable[[], Iterator[Any]]) -> None:
        self.source = source

    def _iterate(self) -> Iterator[Any]:
        return self.source()


class GivenAhead(AsyncDataLoaderMixin, Given):
    """Loads ahead."""


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """Look through the objects of earlier tests once, not in every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive(), thread


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "hvdlite-data-loader"]


@pytest.mark.parametrize("size", [0, 1, 2, 64, sys.maxsize])
def test_every_iteration_gives_all_batches_in_order(size: int) -> None:
    loader = SquaresAhead(size, count=20)
    assert len(loader) == 20
    for _ in range(3):
        assert [batch for batch in loader] == [number**2 for number in range(20)]  # noqa: C416
        assert not threads(), "a loop that is over has no thread"
    in_main = {thread is threading.main_thread() for thread in loader.threads}
    assert in_main == {size == 0}


def test_the_default_is_64_batches_ahead() -> None:
    assert SquaresAhead().async_loader_queue_size == 64
    assert not SquaresAhead().debug_data_loader


def test_a_loader_without_the_mixin_has_no_thread() -> None:
    loader = Squares()
    assert list(loader) == [0, 1, 4, 9, 16]
    assert set(loader.threads) == {threading.main_thread()}


def test_what_a_subclass_must_give() -> None:
    with pytest.raises(NotImplementedError, match="BaseDataLoader does not define __len__"):
        len(BaseDataLoader())
    with pytest.raises(NotImplementedError, match="BaseDataLoader does not define _iterate"):
        next(iter(BaseDataLoader()))


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="async_loader_queue_size=-1 is negative"):
        SquaresAhead(-1)


def test_any_class_with_the_methods_can_be_mixed_in() -> None:
    class Plain:
        def _iterate(self) -> Iterator[int]:
            yield from range(3)

        def _process_batch(self, batch: int) -> int:
            return -batch

    class PlainAhead(AsyncDataLoaderMixin, Plain):  # type: ignore[misc]
        pass

    assert [batch for batch in PlainAhead(1)] == [0, -1, -2]  # noqa: C416
    assert [batch for batch in PlainAhead(0)] == [0, -1, -2]  # noqa: C416


def test_batches_may_be_anything() -> None:
    error = ValueError("a batch, not a failure")
    batches = [None, error, StopIteration(), ()]
    loader = GivenAhead(2, source=lambda: iter(batches))
    for batch, expected in zip(loader, batches, strict=True):
        assert batch is expected


@pytest.mark.parametrize("size", [1, 3])
def test_no_more_than_the_size_is_loaded_ahead(size: int) -> None:
    full = threading.Semaphore(0)
    loaded: list[int] = []

    def source() -> Iterator[int]:
        for number in range(50):
            loaded.append(number)
            full.release()
            yield number

    for taken in GivenAhead(size, source=source):
        for _ in range(min(size, 49 - taken) if taken == 0 else 49 - taken > size - 1):
            full.acquire()  # the thread is ahead of the loop
        assert len(loaded) <= taken + 1 + size


def test_the_thread_loads_while_the_loop_works() -> None:
    next_one = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        next_one.set()
        yield 2

    for batch in GivenAhead(1, source=source):
        assert next_one.wait(20), batch


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("size", [0, 1, 64])
def test_an_error_of_the_thread_is_raised_in_the_loop(size: int, kind: type[BaseException]) -> None:
    error = kind("broken file")

    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise error

    loader = GivenAhead(size, source=source)
    for _ in range(2):
        seen = []
        with pytest.raises(kind, match="broken file") as raised:
            for batch in loader:
                seen.append(batch)
        assert seen == [1, 2], "first what came before the error"
        assert raised.value is error
        assert raised.traceback[-1].name == "source", "the traceback leads to the cause"
        assert not threads()


def test_an_error_before_the_first_batch() -> None:
    def source() -> Iterator[int]:
        raise OSError("no such data")

    with pytest.raises(OSError, match="no such data"):
        next(iter(GivenAhead(source=source)))


def test_an_error_of_the_loop_ends_the_thread() -> None:
    loader = SquaresAhead(1, count=10**9)
    with pytest.raises(ZeroDivisionError):
        for batch in loader:
            _ = 1 // batch
    assert loader.closed.wait(20)


@pytest.mark.parametrize("size", [1, 64])
def test_a_loop_that_is_left_early_ends_the_thread(size: int) -> None:
    loader = SquaresAhead(size, count=10**9)
    for _ in range(3):
        loader.closed.clear()
        for batch in loader:
            if batch == 4:
                break
        assert loader.closed.wait(20), "also the source was closed"
    assert next(iter(loader)) == 0, "a new loop begins anew"


def test_leaving_early_does_not_wait_for_a_source_that_hangs() -> None:
    hangs, go_on = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        yield 1
        hangs.set()
        go_on.wait()

    for _ in GivenAhead(source=source):
        hangs.wait()
        break
    assert len(threads()) == 1
    go_on.set()


def test_a_loader_that_is_garbage_leaves_nothing() -> None:
    loader = SquaresAhead(2, count=10**9)
    closed = loader.closed
    iterator = iter(loader)
    next(iterator)
    gone = weakref.ref(loader)
    cycle = [loader, iterator]
    cycle.append(cycle)  # type: ignore[arg-type]
    del loader, iterator, cycle
    gc.collect()
    assert closed.wait(20)
    for thread in threads():
        thread.join(20)
    gc.collect()
    assert gone() is None


def test_loops_over_one_loader_do_not_disturb_each_other() -> None:
    loader = SquaresAhead(1, count=4)
    pairs = [(one, other) for one in loader for other in loader]
    assert pairs == [(i * i, j * j) for i in range(4) for j in range(4)]


def test_close_ends_all_threads_and_loops() -> None:
    loader = SquaresAhead(3, count=10**9)
    iterators = [iter(loader), iter(loader)]
    for iterator in iterators:
        assert next(iterator) == 0
    assert len(threads()) == 2
    loader.close_async_loader()
    assert not threads()
    for iterator in iterators:
        assert next(iterator, "over") == "over"
    assert next(iter(loader)) == 0, "a closed loader can be used again"
    loader.close_async_loader()
    loader.close_async_loader()


def test_close_waits_for_the_thread_of_a_loop_that_was_left() -> None:
    loader = SquaresAhead(3, count=10**9)
    for _ in loader:
        break
    loader.close_async_loader()
    assert not threads()


def test_close_with_nothing_going_on() -> None:
    SquaresAhead().close_async_loader()
    SquaresAhead(0).close_async_loader()


def test_close_wakes_a_loop_that_waits() -> None:
    waits, go_on = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        waits.set()
        go_on.wait()
        yield 1

    loader = GivenAhead(source=source)
    seen: list[list[int]] = []
    consumer = threading.Thread(target=lambda: seen.append([*loader.__iter__()]))
    consumer.start()
    waits.wait()
    closer = threading.Thread(target=loader.close_async_loader)
    closer.start()
    consumer.join(20)
    assert seen == [[]], "although the source still hangs"
    go_on.set()
    closer.join(20)
    assert not threads()


def test_a_source_may_close_its_loader() -> None:
    def source() -> Iterator[int]:
        loader.close_async_loader()
        yield 1

    loader = GivenAhead(source=source)
    assert [*loader.__iter__()] == []


class Counted(BaseDataLoader):
    """Can be copied."""

    def __len__(self) -> int:
        return 3

    def _iterate(self) -> Iterator[int]:
        yield from range(3)


class CountedAhead(AsyncDataLoaderMixin, Counted):
    """Loads ahead."""


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
@pytest.mark.parametrize("began", [0, 1])
def test_a_loader_can_be_copied_at_any_time(copied: Callable[[Any], Any], began: int) -> None:
    """And a copy has threads of its own, which end with it and not with the first loader."""
    loader = CountedAhead(1)
    assert list(loader) == [0, 1, 2]
    loop = iter(loader)
    assert [next(loop) for _ in range(began)] == list(range(began))
    other = copied(loader)
    of_other = iter(other)
    assert next(of_other) == 0
    loader.close_async_loader()
    assert list(of_other) == [1, 2]
    left = iter(other)
    next(left)
    other.close_async_loader()
    assert not [each for each in threading.enumerate() if each.name == "hvdlite-data-loader"]


def test_debug_says_how_many_are_ready(capsys: pytest.CaptureFixture[str]) -> None:
    loader = SquaresAhead(1, True, count=2)
    assert [*loader.__iter__()] == [0, 1]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "SquaresAhead: batch 0", "SquaresAhead: batch 1",
    ]  # fmt: skip


END = """
import sys, threading
from hvdlite.data import AsyncDataLoaderMixin, BaseDataLoader

class Loader(AsyncDataLoaderMixin, BaseDataLoader):
    def _iterate(self):
        try:
            yield 1
            yield 2
            if "hang" in sys.argv:
                hangs.set()
                threading.Event().wait()
            yield 3
        finally:
            print("closed")

hangs = threading.Event()
iterator = iter(Loader(1))
print(next(iterator), next(iterator))
if "hang" in sys.argv:
    hangs.wait()
sys.exit(7)
"""


@pytest.mark.parametrize(("argument", "output"), [("", "1 2\nclosed\n"), ("hang", "1 2\n")])
def test_the_process_ends_amid_an_iteration(argument: str, output: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", END, argument],
        env=environment(), capture_output=True, text=True, timeout=25, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == (output, "", 7)


def test_it_needs_no_framework() -> None:
    code = "import sys, hvdlite.data; print({'torch', 'numpy', 'mpi4py'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True,
        timeout=25, check=True,
    )  # fmt: skip
    assert done.stdout == "set()\n"
