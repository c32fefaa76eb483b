"""The house rule: a package imports only from itself and from packages below it."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

import hvdlite
from hvdlite.common.collectives.table import SPECS, CollectiveSpec
from hvdlite.module_aliases import own_name

PACKAGE = Path(hvdlite.__file__).parent
ROOT = PACKAGE.parent

# From top to bottom; packages of one floor do not know each other. A module that lies directly in
# `hvdlite` or `hvdlite.common` is a package of its own.
FLOORS = [
    ["hvdlite.ray", "hvdlite.spark"],
    ["hvdlite.launcher"],
    ["hvdlite.launcher.decisions"],
    ["hvdlite.tools", "hvdlite.bench"],
    ["hvdlite.keras"],
    ["hvdlite.torch", "hvdlite.tf", "hvdlite.jax", "hvdlite.numpy"],
    ["hvdlite.ps"],
    ["hvdlite.ps.worker"],
    ["hvdlite.ps.server"],
    ["hvdlite.ps.scheduler"],
    ["hvdlite.ps.cluster", "hvdlite.ps.tables"],
    ["hvdlite.ps.connections"],
    ["hvdlite.ps.layouts"],
    ["hvdlite.checkpoint", "hvdlite.data"],
    ["hvdlite.common.iterations"],
    ["hvdlite.common.gradients"],
    ["hvdlite.common.elastic"],
    ["hvdlite.common.api"],
    ["hvdlite.common.runtime"],
    ["hvdlite.common.engine"],
    ["hvdlite.common.decisions"],
    ["hvdlite.common.devices"],
    ["hvdlite.common.collectives"],
    ["hvdlite.common.transport"],
    ["hvdlite.common.driver_link"],
    ["hvdlite.common.meeting"],
    ["hvdlite.common.connections"],
    ["hvdlite.common.requests", "hvdlite.common.settings", "hvdlite.common.tensors"],
    ["hvdlite.common.segmentation", "hvdlite.common.layouts"],
    ["hvdlite.common.timeline"],
    ["hvdlite.common.base"],
    ["hvdlite.drop_in"],
    ["hvdlite.as_horovod"],
    ["hvdlite.horovod_install"],
    ["hvdlite.module_aliases"],
    ["hvdlite.missing_names"],
]
# The calls upwards: TensorFlow's DistributedOptimizer hands on an optimizer of Keras, that whose
# steps servers make is Keras', and states of elastic training have one for models of Keras.
UPWARDS = {
    ("hvdlite.tf.optimizer", "hvdlite.keras.optimizer.DistributedOptimizer"),
    ("hvdlite.tf.ps", "hvdlite.keras.ps.optimizer.DistributedOptimizer"),
    ("hvdlite.tf.elastic", "hvdlite.keras.elastic"),
    ("hvdlite.tf.elastic", "hvdlite.keras.elastic.TensorFlowKerasState"),
}
# Packages whose modules do no I/O, read no clock and start no thread; and the exceptions to it.
PURE = [
    "hvdlite.common.decisions",
    "hvdlite.common.layouts",
    "hvdlite.common.segmentation",
    "hvdlite.launcher.decisions",
    "hvdlite.ps.layouts",
]
# Modules that are so in packages that are not.
PURE_MODULES = {
    "hvdlite.data.strategies",
    *(
        f"hvdlite.ps.{module}"
        for module in [
            "cluster.membership",
            "scheduler.barrier",
            "scheduler.registry",
            "tables.clocks",
            "tables.first_values",
            "tables.table",
            "worker.shard",
        ]
    ),
}
NOT_PURE = {"hvdlite.common.segmentation.saved_results"}
IMPURE = {"os", "time", "socket", "threading", "select", "asyncio", "subprocess", "logging"}
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "ray", "pyspark"}
# Ranks that torchrun has started meet in a store of torch, so this one imports it in its functions.
IMPORTS_TORCH = "hvdlite.common.meeting.torch_store"
# The launcher starts ranks and is none: it must work where the engine could not even be imported.
LAUNCHER_IMPORTS = {
    "hvdlite.launcher",
    "hvdlite.launcher.decisions",
    "hvdlite.common.base",
    "hvdlite.common.connections",
    "hvdlite.common.meeting",
    "hvdlite.common.driver_link",
    "hvdlite.common.requests",
    "hvdlite.common.settings",
    "hvdlite.ps.cluster",
    "hvdlite.ps.scheduler",
    "hvdlite.as_horovod",
}

FLOOR_OF = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}


def package_of(module: str) -> str | None:
    """The package of the list that holds `module`; None: it is hvdlite itself, or not ours."""
    parts = module.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in FLOOR_OF), None)


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the project, by the name under which it is imported."""
    for folder, name in ((PACKAGE, "hvdlite"), (ROOT / "launcher", "hvdlite.launcher")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([name, *parts]).removesuffix(".__init__"), path


MODULES = dict(modules())


class Contents(NamedTuple):
    """What the rules ask about a file: to parse all files takes seconds."""

    imports: tuple[str, ...]  # At its top or later, also by `import_module("...")`.
    at_once: tuple[str, ...]  # When the module is imported, and not by its functions.
    compared: tuple[str, ...]  # Strings.
    accepts: bool  # Whether it calls a method `accept` without arguments.


@functools.cache
def contents(path: Path) -> Contents:
    tree = ast.parse(path.read_text())
    nodes = [*ast.walk(tree)]
    calls = (node.func for node in nodes if isinstance(node, ast.Call) and not node.args)
    return Contents(
        tuple(imported_by(nodes)), tuple(imported_by(tree.body)), tuple(compared_strings(nodes)),
        any(getattr(function, "attr", "") == "accept" for function in calls),
    )  # fmt: skip


def imports(path: Path) -> tuple[str, ...]:
    return contents(path).imports


def imports_at_once(path: Path) -> tuple[str, ...]:
    return contents(path).at_once


def imported_by(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"from .{node.module} import: say the whole name"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            if name == "import_module" and isinstance(first, ast.Constant):
                yield str(first.value)


def test_every_module_has_a_floor() -> None:
    roofless = {"hvdlite", "hvdlite.common"}
    assert [m for m in MODULES if package_of(m) is None and m not in roofless] == []


@pytest.mark.parametrize("package", FLOOR_OF)
def test_every_package_of_the_list_exists(package: str) -> None:
    assert any(module == package or module.startswith(f"{package}.") for module in MODULES)


@pytest.mark.thorough
def test_a_package_imports_only_itself_and_packages_below_it() -> None:
    wrong = []
    for module, path in MODULES.items():
        package = package_of(module)
        if package is None:
            continue
        for imported in imports(path):
            other = package_of(imported)
            if other in (None, package) or (module, imported) in UPWARDS:
                continue
            if FLOOR_OF[other] <= FLOOR_OF[package]:
                wrong.append(f"{module} imports {imported}")
    assert not wrong


# Every import of a module of ours imports the package itself first, which loads `hvdlite.run` only
# when it is asked for; so what that needs counts at the top of files alone.
ROOT_PACKAGE = "hvdlite"


@pytest.mark.parametrize("when", ["at once", "at any time"])
@pytest.mark.thorough
def test_no_modules_import_each_other_in_a_circle(when: str) -> None:
    """Neither when they are imported, nor by their functions or for the sake of types."""
    below: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        # Of modules, or of what is in one.
        names = imports_at_once(path) if when == "at once" else imports(path)
        modules = {name if name in MODULES else name.rpartition(".")[0] for name in names}
        below[module] = (modules & MODULES.keys()) - {module}
    if when == "at any time":
        below[ROOT_PACKAGE] = set(imports_at_once(MODULES[ROOT_PACKAGE])) & MODULES.keys()
    # Take away what imports nothing that is left, as long as there is any, and then, from the
    # other side, what nothing that is left imports.
    while free := {module for module, names in below.items() if not names & below.keys()}:
        below = {module: names for module, names in below.items() if module not in free}
    while free := below.keys() - set().union(*below.values()):
        below = {module: names for module, names in below.items() if module not in free}
    assert not below


FROM_OURS = re.compile(r"^ *from (hvdlite\.[\w.]+) import ", re.MULTILINE)


def test_imports_name_modules_that_exist() -> None:
    """Also in functions, and in scripts, which few tests run, and which some tests have as text."""
    folders = [PACKAGE, *(ROOT / name for name in ("launcher", "tests", "benchmarks", "examples"))]
    missing = {}
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        own = {own_name(each) for each in FROM_OURS.findall(path.read_text())}
        if unknown := own - MODULES.keys():
            missing[str(path.relative_to(ROOT))] = unknown
    assert not missing


MOST_IN_A_FOLDER = 16  # Modules: more than a reader takes in at a glance.


def test_no_folder_holds_more_modules_than_a_reader_takes_in_at_a_glance() -> None:
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in MODULES.values())
    assert not {folder: n for folder, n in counts.items() if n > MOST_IN_A_FOLDER}


def test_common_knows_no_framework() -> None:
    for module, path in MODULES.items():
        if module.startswith("hvdlite.common"):
            imported = imports_at_once(path) if module == IMPORTS_TORCH else imports(path)
            assert not {name.split(".")[0] for name in imported} & FRAMEWORKS, module


def test_the_launcher_imports_only_the_lowest_floors() -> None:
    found = {
        package_of(name)
        for module, path in MODULES.items()
        if module.startswith("hvdlite.launcher")
        for name in imports(path)
    }
    assert found - {None} == LAUNCHER_IMPORTS


def compared_strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The strings that code compares with something, matches, or looks something up by."""
    for node in nodes:
        operands: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "pop"):
            operands = [*node.args[:1]]
        for operand in operands:
            for part in ast.walk(operand):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_only_the_package_of_the_table_compares_names_of_collectives() -> None:
    """A collective is what its spec says. Settings that have the name of one are no collectives."""
    wrong = [
        (module, name)
        for module, path in MODULES.items()
        if package_of(module) not in ("hvdlite.common.collectives", "hvdlite.launcher")
        for name in contents(path).compared
        if name in SPECS
    ]
    assert set(wrong) <= {("hvdlite.common.settings.config", "allreduce")}


def test_every_field_of_the_table_is_read() -> None:
    code = "\n".join(path.read_text() for path in MODULES.values())
    unread = [
        field.name for field in fields(CollectiveSpec) if not re.search(rf"\.{field.name}\b", code)
    ]
    assert not unread


def test_decisions_do_no_io() -> None:
    for module, path in MODULES.items():
        pure = package_of(module) in PURE and module not in NOT_PURE
        if pure or module in PURE_MODULES:
            assert not {name.split(".")[0] for name in imports(path)} & IMPURE, module


def test_the_map_of_common_lists_the_floors() -> None:
    """`hvdlite/common/__init__.py` shows its packages in the order of the list above."""
    listed = [
        package.removeprefix("hvdlite.common.")
        for packages in FLOORS
        for package in packages
        if package.startswith("hvdlite.common.")
    ]
    text = ast.get_docstring(ast.parse(MODULES["hvdlite.common"].read_text())) or ""
    assert re.findall(r"^    (\w+)  ", text, re.MULTILINE) == listed


# What waits, accepts or proves beside hvdlite/common/connections. These lists may only get shorter:
# whatever needs a connection uses that package.
WAITS = {
    "hvdlite.common.transport.local",
    "hvdlite.common.transport.rendezvous",
    "hvdlite.launcher.processes.console",
}
ACCEPTS = {
    "hvdlite.common.transport.rendezvous",
    "hvdlite.launcher.hosts.probe",
}
PROVES = {"hvdlite.common.transport.tcp.connect"}
NO_CONNECTION = {"hvdlite.torch.elastic.state"}  # What it accepts is a state of training.


def test_connections_are_made_in_one_place() -> None:
    waits, accepts, proves = set(), set(), set()
    for module, path in MODULES.items():
        if package_of(module) == "hvdlite.common.connections":
            continue
        imported = {name.partition(".")[0] for name in imports(path)}
        if imported & {"select", "selectors"}:
            waits.add(module)
        if "hmac" in imported:
            proves.add(module)
        if contents(path).accepts:
            accepts.add(module)
    assert waits == WAITS
    assert accepts - NO_CONNECTION == ACCEPTS
    assert proves == PROVES
