"""Ranks with fake accelerators, whose streams can be held, be slow, and fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fake_accelerator import FakeLibrary
from hvdlite.common.api.forms import Forms
from hvdlite.common.devices import libraries
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from hvdlite.torch.adapter import TorchAdapter
from hvdlite.torch.autograd import TorchRunner
from tests.ranks import run_ranks
from tests.torch.accelerators.direct import CountingDevice

Tensor = torch.Tensor
FAKE = Config(devices="fake")
ON_HOST = Config(devices="fake", device_completion="host")


class Rank:
    """A rank with a fake device."""

    def __init__(self, rank: int, library: FakeLibrary) -> None:
        self.rank = rank
        self.library = library
        self.device = CountingDevice("fake", library.module)
        self.forms = Forms(TorchRunner(TorchAdapter(lambda kind: self.device)))

    @property
    def journal(self) -> list[str]:
        """What the device has done."""
        return self.library.journal

    def compute(self, work: Callable[[], object]) -> None:
        """Queue work of the user's."""
        self.library.module.current_stream().add(work)

    def hold(self) -> Callable[[], None]:
        """Stop the user's stream until the returned function is called."""
        return self.library.module.current_stream().hold()

    def read(self, tensor: Tensor) -> list[Any]:
        """The values that the user's stream sees."""
        seen: list[Any] = []
        done = threading.Event()
        self.compute(lambda: seen.extend(tensor.tolist()))
        self.compute(done.set)
        assert done.wait(20), "the stream stands still"
        return seen


def on_fake(
    main: Callable[[Rank], Any],
    ranks: Sequence[FakeLibrary],
    monkeypatch: pytest.MonkeyPatch,
    config: Config = FAKE,
    hosts: Sequence[Sequence[int]] | None = None,
) -> list[Any]:
    """Run ``main(rank)`` on ranks that have these libraries; return the results."""
    monkeypatch.setattr(libraries, "installed_plug_ins", lambda: ())

    def of_this_rank() -> FakeLibrary:
        return ranks[int(threading.current_thread().name.removeprefix("rank-"))]

    registered = libraries._Registered(of_this_rank, by_name_only=True)
    monkeypatch.setitem(libraries._registered, "fake", registered)

    def body(number: int) -> Any:
        current()._agree([], None)
        library = current().engine.devices.library_of("fake")
        assert isinstance(library, FakeLibrary)
        return main(Rank(number, library))

    return run_ranks(len(ranks), body, config=config, hosts=hosts)


def wait_for(condition: Callable[[], bool]) -> None:
    """Sleep until a condition holds."""
    pause = threading.Event()
    for _ in range(4000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it never came")
