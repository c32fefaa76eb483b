"""What the ranks of the tests' jobs do: python -m tests.parallel.programs NAME ...

Every program checks for itself and prints a line per rank when all is well. Those that are named
run one after the other, with a shutdown between two.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import numpy as np

import hvdlite.numpy as hvd
from tests.parallel.rank_helpers import STARTED_BY_MPI, hear, rank, say, size

PLANES = ("HVDLITE_ALLREDUCE", "HVDLITE_DATA_PLANE")
OVER_MPI = os.environ.get("HVDLITE_TRANSPORT") == "mpi"


def total_of_all(name: str) -> None:
    """Check a sum over all ranks."""
    total(name, hvd.size() * (hvd.size() + 1) / 2)


def total(name: str, expected: float, **options: object) -> None:
    """Check a sum over ranks."""
    result = hvd.allreduce(np.full(3, hvd.rank() + 1.0), name=name, op=hvd.Sum, **options)  # type: ignore[arg-type]
    assert result.tolist() == [expected] * 3, (name, result)


def collectives() -> None:
    """One of each."""
    hvd.init()
    assert (hvd.size(), hvd.rank()) == (size, rank)
    for _ in range(3):
        total("sum", size * (size + 1) / 2)
        rows = hvd.allgather(np.full((rank, 2), rank), name="rows")
        assert rows[:, 0].tolist() == [r for r in range(size) for _ in range(r)]
        assert hvd.broadcast(np.full(4, rank), size - 1, name="root").tolist() == [size - 1] * 4
        sent = hvd.alltoall(np.arange(size) + 100 * rank, name="all")
        assert sent.tolist() == [100 * r + rank for r in range(size)]
        part = hvd.reducescatter(np.arange(size + 1), op=hvd.Sum, name="part")
        start = rank + min(rank, 1)
        assert part.tolist() == [size * i for i in range(start, start + 1 + (rank == 0))]
        hvd.barrier()
        rows = hvd.allgather(np.full((rank + 1, 9000), rank), name="longer rows")
        assert rows[:, -1].tolist() == [r for r in range(size) for _ in range(r + 1)]
        everything = hvd.broadcast(np.full(90_000, rank), 0, name="longer root")
        assert not everything.any()
    big = np.arange(600_000, dtype=np.float32) * rank
    expected = np.arange(600_000, dtype=np.float32) * sum(range(size))
    np.testing.assert_allclose(hvd.allreduce(big, name="big", op=hvd.Sum), expected, rtol=1e-6)
    hosts = int(os.environ.get("HOSTS", "1"))
    local = size // hosts
    assert (hvd.local_rank(), hvd.local_size()) == (rank % local, local)
    assert (hvd.cross_rank(), hvd.cross_size()) == (rank // local, hosts)
    assert hvd.is_homogeneous() and hvd.mpi_built() and hvd.gloo_built()
    assert hvd.gloo_enabled() == (not STARTED_BY_MPI), "one of MPI and Gloo, as in Horovod"
    assert hvd.mpi_enabled() == STARTED_BY_MPI == ("mpi4py" in sys.modules)
    try:
        assert hvd.mpi_threads_supported() in (True, False) and STARTED_BY_MPI
    except ValueError as error:
        assert not STARTED_BY_MPI and "MPI is not enabled" in str(error)
    assert hvd.join() in range(size)


def planes() -> None:
    """One of each, on every data plane; that of MPI runs everything when it is asked for."""
    for plane in ("shm", "ring", "hierarchical", *(["mpi"] if OVER_MPI else [])):
        timeline = f"{os.environ['WORDS']}/{plane}.json"
        others = "ring" if plane == "hierarchical" else plane
        os.environ.update(zip(PLANES, (plane, others), strict=True), HVDLITE_TIMELINE=timeline)
        collectives()
        hvd.shutdown()
        if plane == "mpi" and rank == 0:
            with open(timeline) as file:
                activities = {event.get("name") for event in json.load(file)}
            used = {name for name in activities if name and name.startswith(("MPI_", "SHM_"))}
            assert used >= {f"MPI_{n}" for n in ("ALLREDUCE", "ALLTOALL", "REDUCESCATTER")}, used
            assert "MPI_ALLGATHER" in used and not any(n.startswith("SHM_") for n in used), used
    for name in (*PLANES, "HVDLITE_TIMELINE"):
        del os.environ[name]


def again() -> None:
    """init, shutdown and init in one process, with mpi4py used beside it where there is MPI."""
    for round_ in range(3):
        hvd.init()
        total_of_all(f"sum{round_}")
        if STARTED_BY_MPI:
            from mpi4py import MPI

            assert MPI.COMM_WORLD.allreduce(1) == hvd.size()
        hvd.shutdown()
        assert not hvd.is_initialized()


def parts() -> None:
    """init on parts of the world at the same time, by lists of ranks, and on all of it again."""
    for half in ([0, 1] if rank < 2 else list(range(2, size)), [2, 0] if rank % 2 == 0 else [1, 3]):
        hvd.init(comm=half)
        assert (hvd.size(), hvd.rank()) == (len(half), half.index(rank))
        total_of_all("list")
        assert hvd.local_size() == len(half)
        hvd.shutdown()
    hvd.init(comm=list(range(size)) if rank else None)
    assert (hvd.size(), hvd.rank()) == (size, rank)
    total_of_all("all")
    hvd.shutdown()
    try:
        hvd.init(comm=[size - 1] if rank == 0 else [rank])
    except ValueError as error:
        assert rank == 0 and "leaves out rank 0" in str(error), error
    else:
        assert rank > 0 and hvd.size() == 1


def communicators() -> None:
    """init on a part of the world: an mpi4py communicator."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    part = world.Split(world.rank % 2, -world.rank)  # in reverse order
    hvd.init(comm=part)
    assert (hvd.size(), hvd.rank()) == (part.size, part.rank)
    assert hvd.global_process_set.mpi_comm is part
    total_of_all("comm")
    hvd.shutdown()
    hvd.init(comm=MPI.COMM_SELF)
    assert hvd.size() == 1
    hvd.shutdown()


def process_sets_of_lists() -> None:
    """Static sets and dynamic ones, from lists of ranks."""
    first = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[first])
    if first.included():
        total("first", 4, process_set=first)
    second = hvd.add_process_set([1, 3])
    if second.included():
        total("second", 6, process_set=second)
    assert hvd.remove_process_set(first) and first.process_set_id is None


def process_sets() -> None:
    """Static sets from lists and from communicators, and dynamic ones."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    split = hvd.ProcessSet(world.Split(world.rank % 2))
    hvd.init(process_sets=[split])
    mine = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
    assert split.ranks == mine and split.process_set_id == 1 + world.rank % 2
    total("split", sum(rank + 1 for rank in mine), process_set=split)
    try:
        hvd.init(process_sets=[hvd.ProcessSet(mine)])
    except ValueError as error:
        assert "entry number 0 is a duplicate" in str(error)
    else:
        raise AssertionError("a duplicate was accepted")
    pair = hvd.add_process_set(hvd.ProcessSet(world.Split(world.rank // 3)))
    assert pair.ranks == ([0, 1, 2] if world.rank < 3 else [3])
    assert hvd.remove_process_set(split)


def killed() -> None:
    """A rank, 1 unless VICTIM says another, is killed in the middle of training."""
    victim = int(os.environ.get("VICTIM", "1"))
    hvd.init()
    hvd.barrier()
    if hvd.rank() == victim:
        hvd.allreduce(np.ones(100_000), name="gradient")  # all have left the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while True:
            hvd.allreduce(np.ones(100_000), name="gradient")
    except hvd.HorovodInternalError as error:
        seconds = time.monotonic() - start
        assert f"rank {victim} is gone" in str(error) and error.rank == victim, error
        assert seconds < 30, seconds


def raises() -> None:
    """Rank 1 raises in the middle of training; the others hear of it."""
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        raise RuntimeError("the data is broken")
    try:
        while True:
            hvd.allreduce(np.ones(100_000), name="gradient")
    except hvd.HorovodInternalError as error:
        said = "rank 1 has ended by RuntimeError: the data is broken ("
        assert said in str(error) and "programs.py, line" in str(error), error


def raises_and_shuts_down() -> None:
    """Rank 1 shuts down on its way out; the others hear why."""
    hvd.init()
    hvd.barrier()
    try:
        if hvd.rank() == 1:
            raise RuntimeError("the data is broken")
        while True:
            hvd.allreduce(np.ones(100_000), name="gradient")
    except hvd.HorovodInternalError as error:
        said = "rank 1 has been shut down after RuntimeError: the data is broken ("
        assert said in str(error) and "and cannot take part any more" in str(error), error
    finally:
        hvd.shutdown()


def disagrees() -> None:
    """Each rank has a tensor of another shape."""
    hvd.init()
    hvd.allreduce(np.ones(3 + hvd.rank()), name="x")


def forgets_shutdown() -> None:
    """The script just ends."""
    hvd.init()
    total_of_all("sum")


def leaves_early() -> None:
    """Rank 0 ends long before the others, which go on among themselves, and just end."""
    hvd.init(process_sets=[others := hvd.ProcessSet(range(1, size))])
    if hvd.rank() == 0:
        return
    for step in range(20):
        time.sleep(0.01)  # work
        total(f"sum{step}", size * (size + 1) / 2 - 1, process_set=others)


def leaves_a_join() -> None:
    """The last rank goes, as HOW says, while the others wait in join."""
    hvd.init()
    how, last = os.environ["HOW"], hvd.size() - 1
    if hvd.rank() == last:  # this ends once all others have joined, as they do not call it
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="alone").tolist() == [1]
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "shutdown":
            hvd.shutdown()
        return
    try:
        hvd.join()
    except hvd.HorovodInternalError as error:
        words = "is gone" if how == "kill" else "has been shut down"
        lost = f"connection to rank {last} was lost"
        assert f"rank {last} {words}" in str(error) or lost in str(error), error
    else:
        raise AssertionError("join has returned")


def waits_for_each_other() -> None:
    """Even ranks call a, then b; odd ones first b: at once, later or in a thread, as HOW says."""
    hvd.init()
    names = ("a", "b") if hvd.rank() % 2 == 0 else ("b", "a")
    how, works = os.environ["HOW"], hvd.rank() == 1
    if how == "at once" or not works:
        try:
            for name in names:
                total(name, 3)
        except hvd.HorovodInternalError as error:
            assert how == "at once" and "stalled" in str(error), error
        return
    handle = hvd.allreduce_async(np.full(3, hvd.rank() + 1.0), name="b", op=hvd.Sum)
    thread = threading.Thread(target=hvd.synchronize, args=(handle,))
    if how == "in a thread":
        thread.start()
    time.sleep(4)  # This rank works for so long; it is asked twice meanwhile.
    total("a", 3)
    if how == "in a thread":
        thread.join()
    else:
        hvd.synchronize(handle)


def forks_a_child_that_ends() -> None:
    """A forked child may end as any process does; hvdlite cannot be started in it."""
    hvd.init()
    child = os.fork()
    if child == 0:
        try:
            hvd.init()
        except hvd.HorovodInternalError as error:
            sys.exit(0 if "forked from rank" in str(error) else 1)
        sys.exit(2)
    assert os.waitpid(child, 0)[1] == 0
    total_of_all("after")


def forks() -> None:
    """A forked child is no rank, says so, and does not hide its parent's death."""
    hvd.init()
    total_of_all("before")
    child = os.fork()
    if child == 0:
        try:
            hvd.allreduce(np.ones(1))
        except hvd.HorovodInternalError as error:
            ok = "forked from rank" in str(error)
        try:
            hvd.rank()
        except ValueError:
            os._exit(0 if ok else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    total_of_all("after")
    sleeper = os.fork()
    if sleeper == 0:
        os.closerange(0, 3)  # or it would keep the job's output open
        time.sleep(100)
        os._exit(0)
    if hvd.rank() == 0:
        os.kill(sleeper, signal.SIGKILL)
        os.waitpid(sleeper, 0)
    hvd.barrier()
    if hvd.rank() == 1:
        hvd.allreduce(np.ones(1), name="orphan")  # rank 0 has left the barrier
        os.write(1, f"sleeper {sleeper}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while True:
            hvd.allreduce(np.ones(1), name="orphan")
    except hvd.HorovodInternalError as error:
        assert error.rank == 1 and time.monotonic() - start < 50


def interrupted() -> None:
    """A barrier that a signal has ended on one rank, and barriers in several threads."""
    hvd.init()
    if hvd.rank() == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            hvd.barrier()
        except KeyboardInterrupt:
            say("gave up")
        else:
            raise AssertionError("the barrier has ended without the others")
    else:
        hear("gave up")
        hvd.barrier()  # meets the one that rank 0 has given up
    hvd.barrier()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            for _ in range(30):
                hvd.barrier()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(30):
        total_of_all(f"beside {number}")
    for thread in threads:
        thread.join()
    assert not errors, errors
    total_of_all("after")


if __name__ == "__main__":
    for program in sys.argv[1:]:
        hvd.shutdown()
        globals()[program]()
        os.write(1, f"rank done: {program}\n".encode())  # In one piece.
