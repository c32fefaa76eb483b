"""A job on hvdlite's own binding to NCCL: streams, memory and collectives of the stand-in.

Tensors are on the CPU, whose memory is that of the stand-in's devices.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.api.forms import Forms
from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.devices import libraries
from hvdlite.common.devices.nccl.binding import Nccl
from hvdlite.common.devices.nccl.context import CudaContext, CudaEvent
from hvdlite.common.devices.nccl.cudart import CudaRuntime
from hvdlite.common.devices.nccl.library import KIND, CudaFramework, NcclLibrary
from hvdlite.common.engine.engine import Engine
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from hvdlite.torch.accelerators.graphs import GraphCollectives
from hvdlite.torch.adapter import TorchAdapter
from hvdlite.torch.autograd import TorchRunner
from hvdlite.torch.dtypes import DTYPE_NAMES, DTYPES
from tests.common.devices.nccl.fake import Fake
from tests.ranks import run_ranks
from tests.torch.accelerators.direct import CountingDevice

Tensor = torch.Tensor
NCCL = Config(devices="nccl")


class Context(CudaContext):
    """A device whose tensors are torch's."""

    def __init__(self, cuda: CudaRuntime, device: int) -> None:
        super().__init__(cuda, device)
        self.kept: list[Tensor] = []

    def keep(self, buffer: Any, stream: Any) -> None:
        if isinstance(buffer, Tensor):
            self.kept.append(buffer)
        else:
            super().keep(buffer, stream)


class Framework(CudaFramework):
    """Tensors of torch, and fusion buffers by the CUDA runtime."""

    def dtype(self, buffer: Any) -> str:
        return DTYPE_NAMES[buffer.dtype] if isinstance(buffer, Tensor) else buffer.dtype

    def context(self, device: Any, local_rank: int) -> Context:
        return Context(self._cuda, local_rank)


class Module:
    """What ``torch.cuda`` would be on the stand-in."""

    def __init__(self, cuda: CudaRuntime, rank: int) -> None:
        self._context = CudaContext(cuda, rank)
        self.Event = lambda **options: CudaEvent(cuda, lambda text: None)
        self.user = self._context.new_stream()

    def Stream(self, device: Any = None) -> _Stream:  # noqa: N802
        return _Stream(self._context.new_stream())

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream(self.user)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        """Wait for the user's stream."""
        self._context.record(self.user).synchronize()


class _Stream(int):
    """The address of a stream."""

    def wait_event(self, event: CudaEvent) -> None:
        event.make_wait(int(self))


class Rank:
    """A rank of the job."""

    def __init__(self, rank: int, cuda: CudaRuntime) -> None:
        self.rank = rank
        self.module = Module(cuda, rank)
        self.device = CountingDevice(KIND, self.module)
        self.forms = Forms(TorchRunner(TorchAdapter(lambda kind: self.device)))

    def read(self, tensor: Tensor) -> list[Any]:
        """Return the values when the user's stream has them."""
        self.module.synchronize()
        return tensor.tolist()


def on_nccl(
    fake: Fake,
    size: int,
    main: Callable[[Rank], Any],
    monkeypatch: pytest.MonkeyPatch,
    config: Config = NCCL,
    hosts: Sequence[Sequence[int]] | None = None,
) -> list[Any]:
    """Run ``main(rank)`` on every rank; return the results."""
    cuda = CudaRuntime(fake.path)
    registered = libraries._Registered(
        lambda: NcclLibrary(Nccl(fake.path), Framework(cuda)), by_name_only=True
    )
    monkeypatch.setitem(libraries._registered, "nccl", registered)

    def body(number: int) -> Any:
        current()._agree([], None)
        engines.append(current().engine)
        return main(Rank(number, cuda))

    engines: list[Engine] = []
    results = run_ranks(size, body, config=config, hosts=hosts)
    for engine in engines:
        engine.join()  # It leaves nothing behind that the next test would find.
    return results


def test_every_collective_takes_the_way_of_the_device(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(here: Rank) -> None:
        forms, rank = here.forms, here.rank
        mine = torch.arange(6.0) + 10 * rank
        assert here.read(forms.allreduce(mine)) == [5.0 + i for i in range(6)]
        assert here.read(forms.allreduce(mine, op=hvd.Max)) == [10.0 + i for i in range(6)]
        both = forms.grouped_allreduce([mine, torch.ones(3)], op=hvd.Sum, prescale_factor=0.5)
        assert here.read(both[0]) == [5.0 + i for i in range(6)]
        assert here.read(both[1]) == [1.0] * 3
        whole = torch.full((2, 2), rank + 1, dtype=torch.int16)
        assert here.read(forms.broadcast(whole, 1)) == [[2, 2], [2, 2]]
        rows = torch.full((rank + 1, 2), float(rank))
        assert here.read(forms.allgather(rows)) == [[0, 0], [1, 1], [1, 1]]
        part = forms.reducescatter(torch.arange(3.0) + rank, op=hvd.Sum)
        assert here.read(part) == ([1, 3] if rank == 0 else [5])
        sent, splits = forms.alltoall(torch.arange(3) + 10 * rank, torch.tensor([1, 2]).int())
        assert here.read(sent) == ([0, 10] if rank == 0 else [1, 2, 11, 12])
        assert splits.tolist() == ([1, 1] if rank == 0 else [2, 2])
        assert here.device.staged == 0

    on_nccl(fake, 2, main, monkeypatch)
    for what in ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall"):
        assert f"{what} done 1" in fake.journal


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16, torch.bfloat16])
def test_values_are_those_of_the_host(
    dtype: torch.dtype, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dtype in DTYPES.values()

    def main(here: Rank) -> None:
        tensors = [torch.arange(5).to(dtype) * (here.rank + 1) for _ in range(3)]
        for result in here.forms.grouped_allreduce(tensors, op=hvd.Sum):
            assert here.read(result) == [0, 3, 6, 9, 12]

    on_nccl(fake, 2, main, monkeypatch)


def test_synchronize_does_not_wait_for_the_device(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(here: Rank) -> None:
        here.read(here.forms.allreduce(torch.ones(1), name="connect"))
        fake.c.fake_hold(here.module.user)
        tensor = torch.ones(2)
        handle = here.forms.allreduce_async(tensor, op=hvd.Sum)
        result = here.forms.synchronize(handle)  # Returns while the user's stream stands still.
        assert fake.journal.count(f"allreduce {here.rank}") == 1, "the ready event has not occurred"
        fake.c.fake_release(here.module.user)
        assert here.read(result) == [2, 2]

    on_nccl(fake, 2, main, monkeypatch)


def test_a_failed_rank_is_named_and_everything_is_aborted(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.c.fake_fail(1, 2, 6)

    def main(here: Rank) -> str:
        here.forms.allreduce(torch.ones(1), name="first")
        with pytest.raises(HorovodInternalError) as caught:
            for step in range(1000):
                here.forms.allreduce(torch.ones(1), name=f"grad.{step}")
        return str(caught.value)

    config = Config(devices="nccl", device_completion="host")
    texts = on_nccl(fake, 2, main, monkeypatch, config)
    for text in texts:
        assert "grad.0' on rank 1" in text
        assert "remote process exited" in text
    assert {"abort 0", "abort 1"} <= set(fake.journal)


def test_a_setting_that_cannot_be_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def provider() -> None:
        Nccl("/none/libnccl.so.2")

    registered = libraries._Registered(provider, by_name_only=True)
    monkeypatch.setitem(libraries._registered, "nccl", registered)
    with pytest.raises(ConfigError, match=r"/none/libnccl\.so\.2"):
        libraries.find_libraries("nccl")


def test_it_is_never_taken_unless_it_is_chosen() -> None:
    assert libraries._registered["nccl"].by_name_only
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="finds no device"):
            libraries.find_libraries("nccl")


def in_graphs(
    fake: Fake, main: Callable[[Rank, GraphCollectives], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run ``main(rank, collectives)`` on two ranks whose current streams are the stand-in's."""
    cuda = CudaRuntime(fake.path)

    def body(here: Rank) -> None:
        library = NcclLibrary(Nccl(fake.path), Framework(cuda), blocks=True)
        collectives = GraphCollectives(library=library, streams=here.module)
        try:
            main(here, collectives)
        finally:
            collectives.close()

    on_nccl(fake, 2, body, monkeypatch, Config(devices="off"))


def test_graphs_repeat_collectives(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(here: Rank, collectives: GraphCollectives) -> None:
        whole, part, copy = torch.zeros(4), torch.zeros(2), torch.zeros(4)
        stream = here.module.user
        assert fake.c.cudaStreamBeginCapture(stream, 0) == 0
        collectives.allreduce_(whole)
        collectives.reducescatter_into(part, whole)
        collectives.allgather_into(copy, part)
        collectives.broadcast_(part, 1)
        graph = ctypes.c_void_p()
        assert fake.c.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
        for step in range(1, 4):
            whole.copy_(torch.arange(4.0) + step * here.rank)
            assert fake.c.cudaGraphLaunch(graph, stream) == 0
            mean = [i + step / 2 for i in range(4)]
            assert here.read(whole) == mean
            assert here.read(copy) == [2 * each for each in mean]
            assert here.read(part) == [2 * each for each in mean[2:]]
        collectives.check()

    in_graphs(fake, main, monkeypatch)


def test_graphs_refuse_what_they_cannot_do(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(here: Rank, collectives: GraphCollectives) -> None:
        with pytest.raises(ValueError, match="int32 has no average here: use op=Sum"):
            collectives.allreduce_(torch.ones(2, dtype=torch.int32))
        with pytest.raises(ValueError, match=f"rank {here.rank}: nccl does not run allreduce of"):
            collectives.allreduce_(torch.ones(2, dtype=torch.bool), hvd.Sum)
        with pytest.raises(ValueError, match=r"strides \(1, 3\): use tensor.contiguous"):
            collectives.allreduce_(torch.ones(2, 3).t())
        with pytest.raises(ValueError, match=r"2 times as many elements.* not 3 of .* and 2 of"):
            collectives.allgather_into(torch.ones(3), torch.ones(2))
        with pytest.raises(ValueError, match="root rank 5 is not among"):
            collectives.broadcast_(torch.ones(1), 5)

    in_graphs(fake, main, monkeypatch)


def test_graphs_tell_of_failures(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.c.fake_fail(1, 1, 6)

    def main(here: Rank, collectives: GraphCollectives) -> None:
        tensor = torch.ones(2)  # The stand-in's streams do not keep memory.
        if here.rank == 0:
            collectives.allreduce_(tensor)
        else:
            with pytest.raises(HorovodInternalError, match=r"of rank 1: .*code 6"):
                collectives.allreduce_(tensor)
                for _ in range(20_000):
                    collectives.check()
                    time.sleep(0.001)
        collectives.abort()
        here.module.synchronize()
        del tensor

    in_graphs(fake, main, monkeypatch)


def test_graphs_raise_what_is_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(here: Rank, collectives: GraphCollectives) -> None:
        fake.c.fake_refuse(here.rank, 5)
        with pytest.raises(HorovodInternalError, match=r"rank .: ncclBroadcast .*invalid usage"):
            collectives.broadcast_(torch.ones(1), 0)
        collectives.abort()

    in_graphs(fake, main, monkeypatch)
