"""The house rule: a room imports only from strictly lower floors, and common knows no framework."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hvdlite

PACKAGE = Path(hvdlite.__file__).parent
ROOT = PACKAGE.parent

FLOORS = [
    ["common.base.errors", "common.base.bitsets", "common.base.warn"],
    ["common.segmentation"],
    ["common.base.reduce_op", "common.base.topology", "common.plain.config", "common.plain.adapter", "common.plain.handles",
     "common.plain.messages", "common.plain.process_set_table", "common.timeline.chrome_trace", "common.plain.compression",
     "common.base.report_failure", "common.base.gc_pause", "common.iterations.rows",
     "common.runtime.trainers"],
    ["common.timeline.recorder", "common.decisions.control_tree", "common.plain.logs", "common.plain.numpy_adapter",
     "common.decisions.request_readiness", "common.decisions.bit_readiness", "common.collectives.native.build",
     "common.decisions.gaussian_process", "common.iterations.files"],
    ["common.transport"],
    ["common.collectives"],
    ["common.decisions.response_cache", "common.decisions.fusion", "common.decisions.stall_inspector", "common.decisions.grouped"],
    ["common.decisions.coordinator", "common.decisions.aggregator", "common.decisions.autotuner"],
    ["common.engine.executor"],
    ["common.engine.tensor_queue", "common.iterations.marks"],
    ["common.engine.control_plane", "common.engine.autotuning"],
    ["common.engine.engine"],
    ["common.runtime.process_sets"],
    ["common.runtime.connect"],
    ["common.runtime.runtime"],
    ["common.runtime.basics", "common.api.options", "common.gradients.user_calls"],
    ["common.api.submit"],
    ["common.api.differentiable"],
    ["common.api.forms"],
    ["common.api.objects", "common.gradients.buckets", "common.gradients.variables"],
    ["common.gradients.segment_plan", "common.gradients.auto_segments", "common.api.horovod_util", "common.iterations.trace"],
    ["common.gradients.reducer"],
    ["data", "numpy", "tf", "torch"],
    ["keras"],
]  # fmt: skip
PURE = ["common.decisions.coordinator", "common.decisions.aggregator", "common.decisions.response_cache", "common.decisions.fusion",
        "common.decisions.stall_inspector", "common.decisions.request_readiness", "common.decisions.bit_readiness", "common.decisions.grouped",
        "common.base.bitsets", "common.decisions.autotuner", "common.decisions.gaussian_process"]  # fmt: skip
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax"}
IMPURE = {"os", "time", "socket", "threading", "select", "asyncio", "subprocess", "logging"}

FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str | None:
    """`hvdlite.common.transport.mpi` -> `common.transport`."""
    parts = module.split(".")[1:]
    for end in range(len(parts), 0, -1):
        room = ".".join(parts[:end])
        if room in FLOOR_OF:
            return room
    return None


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_a_room_imports_only_from_lower_floors() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(module_of(path))
        if room is None:
            continue
        for module in imports(path):
            other = room_of(module) if module.startswith("hvdlite.") else None
            if other is not None and other != room and FLOOR_OF[other] >= FLOOR_OF[room]:
                wrong.append(f"{room} imports {other}")
    assert not wrong


def test_every_module_of_common_has_a_floor() -> None:
    for path in (PACKAGE / "common").rglob("*.py"):
        if path.name != "__init__.py":
            assert room_of(module_of(path)) is not None, path


def test_common_knows_no_framework() -> None:
    for path in (PACKAGE / "common").rglob("*.py"):
        assert not {module.split(".")[0] for module in imports(path)} & FRAMEWORKS, path


def test_the_launcher_imports_only_the_lowest_floors() -> None:
    for path in (ROOT / "launcher").rglob("*.py"):
        for module in imports(path):
            if module.startswith("hvdlite.common"):
                room = room_of(module)
                assert room is not None and FLOOR_OF[room] <= 2, f"{path} imports {module}"


def test_decisions_do_no_io() -> None:
    for room in PURE:
        path = PACKAGE.joinpath(*room.split(".")).with_suffix(".py")
        modules = {module.split(".")[0] for module in imports(path)}
        assert not modules & IMPURE, room
