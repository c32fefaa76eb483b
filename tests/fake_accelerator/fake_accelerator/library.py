"""The library of the fake accelerator."""

from __future__ import annotations

import threading
import uuid
from typing import Any, ClassVar

from fake_accelerator.communicator import FakeCommunicator, Hub
from fake_accelerator.context import FakeContext
from fake_accelerator.streams import FakeModule
from hvdlite.common.base.reduce_op import ReduceOp

# As some vendors' libraries, it has neither products nor float64.
DTYPES = frozenset(("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32"))
OPS = frozenset((ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX))


class FakeLibrary:
    """Collectives of fake devices, for ranks that are threads of one process."""

    name = "FCCL"
    device_kind = "fake"
    shares_devices = False
    _hubs: ClassVar[dict[bytes, Hub]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()  # Guards `_hubs`.

    def __init__(
        self,
        module: FakeModule | None = None,
        *,
        dtypes: frozenset[str] = DTYPES,
        device: int | None = None,
        refusal: str = "",
        failures: dict[int, str] | None = None,
    ) -> None:
        """Use `device` instead of that of the local rank; refuse to connect, or fail later."""
        self.module = module or FakeModule()
        self.journal: list[str] = []
        self.communicators: list[FakeCommunicator] = []
        self._dtypes = dtypes
        self._device = device
        self._refusal = refusal
        self._failures = failures or {}

    def supports(self, collective: str, dtype: str, op: ReduceOp | None) -> bool:
        """Return whether it runs this."""
        return dtype in self._dtypes and (op is None or op in OPS)

    def context(self, device: Any, local_rank: int) -> FakeContext:
        """Return the context of a device."""
        number = local_rank if self._device is None else self._device
        return FakeContext(self.module, f"fake {number}", self.journal)

    def unique_id(self) -> bytes:
        """Return what no other communicator has."""
        return uuid.uuid4().bytes

    def connect(
        self, unique_id: bytes, index: int, size: int, context: FakeContext
    ) -> FakeCommunicator:
        """Meet the other members."""
        if self._refusal:
            raise RuntimeError(self._refusal)
        with self._lock:
            hub = self._hubs.setdefault(unique_id, Hub(size))
        name = f"{index} of {size}"
        made = FakeCommunicator(hub, index, self._failures, self.journal, name)
        self.communicators.append(made)
        return made
