"""hvdlite's binding to NCCL on a compiled stand-in: values, order, errors, aborts, graphs."""

from __future__ import annotations

import ctypes
import threading
import time
from functools import partial

import numpy as np
import pytest

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.devices.nccl.binding import DTYPES, IN_PROGRESS, NcclError
from hvdlite.common.devices.nccl.context import CudaContext
from hvdlite.common.devices.nccl.cudart import CudaRuntime
from hvdlite.common.tensors.adapter import numpy_dtype
from tests.common.devices.nccl.fake import Array, Fake, Member, run_members, values_of
from tests.ranks import run_threads

SIZE = 3
ORACLES = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def given(index: int, count: int, dtype: str) -> Array:
    """What a member gives: small whole numbers, whose sums and products every dtype has."""
    return np.random.default_rng(index).integers(1, 4, count).astype(numpy_dtype(dtype))


def total(count: int, dtype: str, op: ReduceOp = ReduceOp.SUM) -> Array:
    parts = [given(index, count, dtype) for index in range(SIZE)]
    result: Array = ORACLES[op].reduce(np.stack(parts).astype(np.float64))
    return result.astype(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_are_those_of_numpy(fake: Fake, dtype: str) -> None:
    def main(member: Member) -> None:
        for op in ORACLES:
            source = member.give(given(member.index, 6, dtype))
            everywhere, at_root, part = (member.room(n, dtype) for n in (6, 6, 2))
            member.call("allreduce", source, everywhere, op)
            member.call("reduce", source, at_root, op, 1)
            member.call("reducescatter", source, part, op)
            expected = total(6, dtype, op)
            assert np.array_equal(member.read(everywhere), expected)
            mine = slice(2 * member.index, 2 * member.index + 2)
            assert np.array_equal(values_of(part), expected[mine])
            if member.index == 1:
                assert np.array_equal(values_of(at_root), expected)
            member.call("allreduce", source, source, op)
            assert np.array_equal(member.read(source), expected), "in place"

    run_members(fake, SIZE, main)


@pytest.mark.parametrize("dtype", ["int8", "int16", "bool", "complex64", "bfloat16"])
def test_what_is_moved_may_have_any_dtype(fake: Fake, dtype: str) -> None:
    def main(member: Member) -> None:
        mine = given(member.index, 4, dtype)
        buffer = member.give(mine)
        everything = member.room(4 * SIZE, dtype)
        member.call("allgather", buffer, everything)
        expected = np.concatenate([given(index, 4, dtype) for index in range(SIZE)])
        assert np.array_equal(member.read(everything), expected)
        member.call("broadcast", buffer, 2)
        assert np.array_equal(member.read(buffer), given(2, 4, dtype))

    run_members(fake, SIZE, main)


def test_alltoall_sends_as_many_as_the_counts_say(fake: Fake) -> None:
    counts = [[1, 0, 2], [3, 1, 0], [0, 2, 2]]

    def main(member: Member) -> None:
        sent = counts[member.index]
        received = [row[member.index] for row in counts]
        source = member.give(np.arange(sum(sent), dtype=np.int32) + 100 * member.index)
        target = member.room(sum(received), "int32")
        member.call("alltoall", source, sent, target, received)
        expected = []
        for index, row in enumerate(counts):
            start = sum(row[: member.index])
            expected += [100 * index + start + i for i in range(row[member.index])]
        assert member.read(target).tolist() == expected

    run_members(fake, SIZE, main)


def test_calls_return_before_the_device_has_done_anything(fake: Fake) -> None:
    def main(member: Member) -> None:
        buffer = member.give(np.ones(3, np.float32))
        member.context.record(member.stream).synchronize()
        fake.c.fake_hold(member.stream)
        member.call("allreduce", buffer, buffer, ReduceOp.SUM)
        event = member.context.record(member.stream)
        assert not event.query()
        assert values_of(buffer).tolist() == [1, 1, 1]
        fake.c.fake_release(member.stream)
        event.synchronize()
        assert event.query()
        assert values_of(buffer).tolist() == [2, 2, 2]

    run_members(fake, 2, main)


def test_a_stream_waits_for_events_of_another(fake: Fake) -> None:
    def main(member: Member) -> None:
        context = member.context
        user = context.new_stream()
        buffer = member.give(np.zeros(2, np.int64))
        context.record(member.stream).synchronize()
        fake.c.fake_hold(user)
        context.run(user, lambda: context.fill(buffer, member.index + 1))
        context.wait(member.stream, context.record(user))
        member.call("allreduce", buffer, buffer, ReduceOp.SUM)
        done = context.record(member.stream)
        assert not done.query()
        fake.c.fake_release(user)
        done.synchronize()
        assert values_of(buffer).tolist() == [3, 3]
        context.free_stream(user)

    run_members(fake, 2, main)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_a_communicator_of_one_multiplies(fake: Fake, dtype: str) -> None:
    def main(member: Member) -> None:
        buffer = member.give(np.arange(5).astype(numpy_dtype(dtype)))
        member.context.run(member.stream, lambda: member.context.scale(buffer, 0.5))
        assert member.read(buffer).astype(np.float64).tolist() == [0, 0.5, 1, 1.5, 2]

    run_members(fake, 2, main)


def test_a_failure_never_ends_until_it_is_aborted(fake: Fake) -> None:
    fake.c.fake_fail(1, 2, 6)

    def main(member: Member) -> None:
        buffer = member.give(np.ones(2, np.float32))
        member.call("allreduce", buffer, buffer, ReduceOp.SUM)
        assert member.read(buffer).tolist() == [2, 2]
        member.call("allreduce", buffer, buffer, ReduceOp.SUM)
        done = member.context.record(member.stream)
        if member.index == 1:
            until = time.monotonic() + 20
            while not member.communicator.async_error():
                assert time.monotonic() < until
                time.sleep(0.001)
            reason = member.communicator.async_error()
            assert "member 1 of 2" in reason
            assert "remote process exited" in reason
            assert "code 6" in reason
            assert "the fake says more" in reason
        assert not done.query()
        member.communicator.abort()
        done.synchronize()
        assert member.communicator.async_error()

    run_members(fake, 2, main)
    assert sorted(line for line in fake.journal if line.startswith("abort")) == [
        "abort 0", "abort 0", "abort 0", "abort 1",
    ]  # fmt: skip


def test_a_call_that_is_refused_is_an_error_of_the_communicator(fake: Fake) -> None:
    fake.c.fake_refuse(0, 5)

    def main(member: Member) -> None:
        buffer = member.give(np.ones(2, np.float32))
        if member.index == 0:
            member.call("allreduce", buffer, buffer, ReduceOp.SUM)
            reason = member.communicator.async_error()
            assert "ncclAllReduce at member 0 of 2" in reason
            assert "invalid usage" in reason
            member.call("broadcast", buffer, 0)  # Nothing more is queued.
            assert member.read(buffer).tolist() == [1, 1]
        member.communicator.abort()

    run_members(fake, 2, main)
    assert not any("broadcast" in line for line in fake.journal)


def test_an_error_within_a_group_ends_the_group(fake: Fake) -> None:
    fake.c.fake_refuse(0, 5)

    def main(member: Member) -> None:
        buffer, target = member.give(np.ones(2, np.float32)), member.room(2, "float32")
        if member.index == 0:
            member.call("alltoall", buffer, [1, 1], target, [1, 1])
            assert "ncclSend at member 0 of 2" in member.communicator.async_error()
            assert fake.c.fake_depth() == 0
        member.communicator.abort()

    run_members(fake, 2, main)


def test_an_error_of_the_device_is_one_of_the_communicator(fake: Fake) -> None:
    def main(member: Member) -> None:
        event = member.context.record(member.stream)
        fake.c.fake_event_error(700)
        assert event.query(), "nobody may wait for it for ever"
        assert "illegal memory access" in member.communicator.async_error()
        assert "cuda 0000:00:00.0" in member.communicator.async_error()
        fake.c.fake_event_error(0)

    run_members(fake, 1, main)


def test_connecting_does_not_block_and_says_why_it_failed(fake: Fake) -> None:
    library = fake.library()
    context = library.context(None, 0)
    fake.c.fake_late(1, 2)
    with pytest.raises(NcclError, match=r"connecting member 1 of 2: NCCL 2.27.3 reports .*system"):
        library.connect(library.unique_id(), 1, 2, context)
    assert "abort 1" in fake.journal


def test_members_that_never_come_are_an_error(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_START_TIMEOUT", "1")
    library = fake.library()
    with pytest.raises(NcclError, match=r"did not come within 1 s.*NCCL_SOCKET_IFNAME"):
        library.connect(library.unique_id(), 0, 2, library.context(None, 0))
    assert "abort 0" in fake.journal


def test_a_device_is_that_of_the_context(fake: Fake) -> None:
    def main(member: Member) -> str:
        return member.context.identity

    identities = run_members(fake, 2, main)
    assert len(set(identities)) == 2
    connected = [line for line in fake.journal if line.startswith("connect") and "of 2" in line]
    assert sorted(connected) == ["connect 0 of 2 device 0", "connect 1 of 2 device 1"]


def test_work_of_the_host_is_awaited_after_each_call(fake: Fake) -> None:
    fake.c.fake_polls(5)  # The library says five times that it is not ready yet.

    def main(member: Member) -> None:
        buffer = member.give(np.ones(2, np.float32))
        member.call("allreduce", buffer, buffer, ReduceOp.SUM)
        assert member.read(buffer).tolist() == [2, 2]

    run_members(fake, 2, main)


def test_a_member_that_does_not_answer_is_an_error(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL connects members in the first collective, too, while the engine waits."""
    monkeypatch.setenv("HVDLITE_START_TIMEOUT", "1")

    def main(member: Member) -> None:
        if member.index == 0:
            buffer = member.give(np.ones(2, np.float32))
            fake.c.fake_late(0, IN_PROGRESS)
            member.call("allreduce", buffer, buffer, ReduceOp.SUM)
            reason = member.communicator.async_error()
            assert "ncclAllReduce at member 0 of 2: NCCL has not queued it within 1 s" in reason
        member.communicator.abort()

    run_members(fake, 2, main)


def test_a_graph_records_collectives_and_runs_them_again(fake: Fake) -> None:
    """While a stream records, the stand-in refuses all that waits, allocates or asks an event."""

    def main(member: Member) -> None:
        buffer = member.give(np.zeros(4, np.float32))
        parts, gathered = member.room(2, "float32"), member.room(4, "float32")
        exchanged = member.room(4, "float32")
        member.context.record(member.stream).synchronize()
        assert fake.c.cudaStreamBeginCapture(member.stream, 0) == 0
        member.call("allreduce", buffer, buffer, ReduceOp.SUM)
        member.context.run(member.stream, lambda: member.context.scale(buffer, 0.5))
        member.call("reducescatter", buffer, parts, ReduceOp.SUM)
        member.call("allgather", parts, gathered)
        member.call("alltoall", gathered, [2, 2], exchanged, [2, 2])
        graph = ctypes.c_void_p()
        assert fake.c.cudaStreamEndCapture(member.stream, ctypes.byref(graph)) == 0
        assert values_of(buffer).tolist() == [0] * 4, "nothing has run"
        for step in range(1, 4):
            mine = np.full(4, step * (member.index + 1), np.float32)
            write = partial(member.context.write, buffer, mine)
            member.context.run(member.stream, write)
            assert fake.c.cudaGraphLaunch(graph, member.stream) == 0
            assert member.read(exchanged).tolist() == [3.0 * step] * 4
        assert member.communicator.async_error() == ""

    run_members(fake, 2, main)


def test_memory_is_freed_behind_the_work_of_all_streams(fake: Fake) -> None:
    def main(member: Member) -> None:
        context = member.context
        user = context.new_stream()
        memory = member.give(np.ones(3, np.float32))
        address = memory.data_ptr()
        context.keep(memory[1:], user)
        part = memory[1:]
        context.record(member.stream).synchronize()
        fake.c.fake_hold(user)
        del memory
        assert member.read(part).tolist() == [1, 1], "a part keeps the whole"
        del part
        freed = context.record(member.stream)
        assert not freed.query(), "the other stream still uses it"
        assert fake.c.fake_allocated(address)
        fake.c.fake_release(user)
        freed.synchronize()
        assert not fake.c.fake_allocated(address)
        context.free_stream(user)

    run_members(fake, 1, main)


def test_memory_is_freed_behind_a_stream_of_another_context_that_is_gone(fake: Fake) -> None:
    """As that of a tensor which was lifted to the device, when the job has failed meanwhile."""
    cuda = CudaRuntime(fake.path)
    context, other = CudaContext(cuda, 0), CudaContext(cuda, 0)
    stream, used_on = context.new_stream(), other.new_stream()
    with context.allocating(stream):
        memory = context.empty(3, "float32")
    address = memory.data_ptr()
    context.keep(memory, used_on)
    fake.c.fake_hold(used_on)
    other.free_stream(used_on)
    del memory
    freed = context.record(stream)
    assert not freed.query(), "what was queued is not done"
    assert fake.c.fake_allocated(address)
    fake.c.fake_release(used_on)
    until = time.monotonic() + 20
    while not freed.query():
        assert time.monotonic() < until
        time.sleep(0.001)
    assert not fake.c.fake_allocated(address)
    context.free_stream(stream)


def test_an_abort_from_another_thread_wakes_a_stream(fake: Fake) -> None:
    def main(member: Member) -> None:
        buffer = member.give(np.ones(2, np.float32))
        if member.index == 0:
            member.call("broadcast", buffer, 1)
            done = member.context.record(member.stream)
            threading.Thread(target=member.communicator.abort).start()
            done.synchronize()

    run_members(fake, 2, main)


def test_closing_frees_and_does_not_abort(fake: Fake) -> None:
    run_members(fake, 2, lambda member: None)
    mine = [line for line in fake.journal if line.endswith("1")]
    assert mine[-2:] == ["finalize 1", "destroy 1"]


def test_memory_of_the_host_is_pinned(fake: Fake) -> None:
    """Copies with memory that is not wait for the device, and a lost member for ever."""
    context = fake.library().context(None, 0)
    memory, larger = context.host_memory(3, "float32"), context.host_memory(5, "float32")
    first, second = memory.buffer.data_ptr(), larger.buffer.data_ptr()
    assert first != second
    assert fake.c.fake_pinned(first) and fake.c.fake_pinned(second)
    assert first == memory.array.ctypes.data
    assert (memory.array.size, larger.array.size) == (3, 5)
    array = memory.array
    del memory, larger
    assert fake.c.fake_pinned(first) and fake.c.fake_pinned(second), "copies may be queued"
    del context
    array[:] = 1  # Whoever has an array has the memory.
    assert fake.c.fake_pinned(first)
    assert not fake.c.fake_pinned(second)
    del array
    assert not fake.c.fake_pinned(first)


def test_zeros_do_not_wait_for_the_device(fake: Fake) -> None:
    def main(member: Member) -> None:
        buffer = member.give(np.ones(3, np.float32))
        part = buffer[1:]
        member.context.run(member.stream, lambda: member.context.fill(part, 0))
        assert member.read(buffer).tolist() == [1, 0, 0]
        member.context.run(member.stream, lambda: member.context.fill(part, 7))
        assert member.read(buffer).tolist() == [1, 7, 7]

    run_members(fake, 1, main)


def test_a_thread_uses_no_device_but_its_own(fake: Fake) -> None:
    """A context of CUDA on a device takes some hundred megabytes of it."""
    cuda = CudaRuntime(fake.path)

    def main(_: int) -> None:  # On devices that other tests leave alone.
        fake.c.fake_choose(5)
        with cuda.on(6):
            pass
        assert [fake.c.fake_uses(number) for number in (5, 6)] == [0, 1]
        with cuda.on(7):
            pass
        current = ctypes.c_int()
        fake.c.cudaGetDevice(ctypes.byref(current))
        assert current.value == 6, "one that is used is chosen again"

    run_threads(1, main)


def test_a_thread_asks_events_while_another_records_a_graph(fake: Fake) -> None:
    context = fake.library().context(None, 3)
    stream, users = context.new_stream(), context.new_stream()
    event = context.record(stream)
    event.synchronize()
    assert fake.c.cudaStreamBeginCapture(users, 0) == 0

    def main(_: int) -> None:
        context.begin_thread()
        current = ctypes.c_int()
        fake.c.cudaGetDevice(ctypes.byref(current))
        assert current.value == 3
        assert event.query()
        assert not context.error

    try:
        run_threads(1, main)
    finally:
        assert fake.c.cudaStreamEndCapture(users, ctypes.byref(ctypes.c_void_p())) == 0


def test_an_event_that_has_not_occurred_leaves_no_error_behind(fake: Fake) -> None:
    context = fake.library().context(None, 0)
    stream = context.new_stream()
    fake.c.fake_hold(stream)
    event = context.record(stream)
    assert not event.query()
    assert fake.c.cudaGetLastError() == 0
    fake.c.fake_release(stream)
    event.synchronize()
