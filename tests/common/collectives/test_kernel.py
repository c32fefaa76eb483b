"""The kernel in wheels: every variant has the same bits, and the processor's flags choose one."""

from __future__ import annotations

import logging
import platform
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Array, Reduction
from hvdlite.common.collectives.native import kernel
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.common.collectives.native.library import Library, find_kernel, library
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.transport.base import Transport
from tests.backends import all_members, quiet, run_on_transports, wide_dtype
from tests.compilers import Compiler
from tests.limits import HANG_SECONDS
from tests.wheel import cross_compiler

pytestmark = pytest.mark.timeout(240)
FLOATS = ("float32", "float64", "float16", "bfloat16")
MACHINE = platform.machine()
OWN = kernel.candidates(MACHINE, kernel.processor_features())  # what this machine can run
HASWELL = "fpu sse sse2 ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt avx f16c abm bmi1 avx2 bmi2"
SKYLAKE_X = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"


@pytest.fixture(scope="module")
def shipped(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The libraries of the wheel, in a folder as it is installed."""
    folder = tmp_path_factory.mktemp("installed")
    prefix = "hvdlite/common/collectives/native/shipped/"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(prefix)]
        archive.extractall(folder, names)
    if not names:
        pytest.skip("the wheel is pure, as there is no C++ compiler")
    return folder / prefix


@pytest.fixture(scope="module")
def libraries(shipped: Path) -> dict[str, Library]:
    """Every variant that this machine can run, and what it compiles for itself."""
    found = {
        variant.name: Library(str(shipped / kernel.file_name(MACHINE, variant)), "a test", number)
        for number, variant in enumerate(OWN)
    }
    native = library("on")
    assert native is not None
    return {**found, "compiled here": native}


def hard_numbers(dtype: str, members: int, size: int) -> Array:
    """Numbers of every kind by member, of which one at most is a NaN in each place."""
    wanted = numpy_dtype(dtype)
    generator = np.random.default_rng(7)
    bits = generator.integers(0, 256, (members, size * wanted.itemsize), np.uint8)
    numbers = bits.view(wanted)
    numbers[:, ::7] *= numpy_dtype(dtype).type(0.0)  # zeros of both signs, and more NaNs
    special = [np.inf, -np.inf, np.nan, np.finfo(np.float32).smallest_subnormal]
    numbers[0, 1::11] = np.resize(np.array(special).astype(wanted), numbers[0, 1::11].shape)
    has_nan = np.isnan(numbers.astype(np.float64))
    second = has_nan & (np.cumsum(has_nan, axis=0) > 1)
    numbers[second] = wanted.type(1.5)
    return numbers


def expected_sum(parts: Array, reduction: Reduction) -> Array:
    """The sum as numpy has it: in the order of the members, scaled before and after."""
    wide = wide_dtype(parts.dtype).type
    total = parts[0].astype(wide) * wide(reduction.prescale)
    for part in parts[1:]:
        total = total + part.astype(wide) * wide(reduction.prescale)
    rounded: Array = (total * wide(reduction.postscale)).astype(parts.dtype)
    return rounded


def reduced(parts: Array, found: Sequence[Library], reduction: Reduction) -> list[Array]:
    """The sums of all ranks, each of which has a library of its own."""

    def program(transport: Transport) -> Array:
        backend = ShmBackend(transport, found[transport.rank])
        array = parts[transport.rank].copy()
        backend.allreduce(all_members(transport), [array], [array], reduction, quiet)
        return array

    results: list[Array] = run_on_transports(Topology.single_host(len(parts)), program)
    return results


def assert_same_numbers(result: Array, expected: Array) -> None:
    """Bit by bit, but for what is kept of a NaN."""
    known = ~np.isnan(expected.astype(np.float64))
    assert known.any() and not known.all()
    assert result[known].tobytes() == expected[known].tobytes()
    assert np.isnan(result[~known].astype(np.float64)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_all_variants_give_the_same_bits(
    libraries: dict[str, Library], dtype: str, members: int
) -> None:
    assert len(libraries) == len(OWN) + 1 >= 2
    for size in (1001, 200_003):  # reduced as a whole, and in parts
        parts = hard_numbers(dtype, members, size)
        for reduction in (Reduction(ReduceOp.SUM), Reduction(ReduceOp.SUM, 0.7, 1 / 3)):
            expected = expected_sum(parts, reduction)
            sums = {
                name: reduced(parts, [found] * members, reduction)
                for name, found in libraries.items()
            }
            for results in sums.values():
                assert_same_numbers(results[0], expected)
                for result in results:  # with their NaNs
                    assert result.tobytes() == sums["baseline"][0].tobytes()


def test_ranks_with_different_variants_reduce_together(libraries: dict[str, Library]) -> None:
    assert len({each.identity for each in libraries.values()}) == len(libraries)
    reduction = Reduction(ReduceOp.SUM)
    for size in (1001, 200_003):
        parts = np.random.default_rng(1).standard_normal((len(libraries), size))
        results = reduced(parts, list(libraries.values()), reduction)
        for result in results:
            assert result.tobytes() == expected_sum(parts, reduction).tobytes()


# -- which variant is taken


@pytest.mark.parametrize(
    "machine, words, names",
    [
        ("x86_64", SKYLAKE_X, ["avx512", "avx2", "baseline"]),
        ("x86_64", HASWELL, ["avx2", "baseline"]),
        ("x86_64", HASWELL.replace("avx2", ""), ["baseline"]),  # Ivy Bridge
        ("x86_64", f"{HASWELL} avx512f avx512cd", ["avx2", "baseline"]),  # Knights Landing
        ("x86_64", "", ["baseline"]),
        ("aarch64", "fp asimd evtstrm aes pmull", ["baseline"]),
        ("riscv64", "", []),
    ],
)
def test_the_flags_of_the_processor_choose(machine: str, words: str, names: list[str]) -> None:
    assert [each.name for each in kernel.candidates(machine, words.split())] == names


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n",
            {"fpu", "avx2"},
        ),
        ("processor\t: 0\nFeatures\t: fp asimd\n", {"fp", "asimd"}),
        ("no such line\n", set()),
        (None, set()),
    ],
    ids=["x86_64", "aarch64", "empty", "none"],
)
def test_the_flags_are_those_of_the_first_processor(
    text: str | None, words: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "CPU_INFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert kernel.processor_features() == words


def open_library(path: str, origin: str, identity: int) -> tuple[str, str]:
    """Load a library, and return the name of its file and where it is from."""
    Library(path, origin, identity)
    return Path(path).name, origin


@pytest.fixture
def installed(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed wheel without a compiler: the folder of its libraries."""
    folder = tmp_path / "native"
    shutil.copytree(shipped, folder / kernel.SHIPPED)
    for path in (*kernel.sources(), *kernel.headers()):
        shutil.copy(path, folder)
    monkeypatch.setattr(kernel, "FOLDER", folder)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel.digest.cache_clear()
    yield folder / kernel.SHIPPED
    kernel.digest.cache_clear()


def test_the_fastest_shipped_variant_is_taken(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(path: str, origin: str, identity: int) -> int:
        assert path == str(installed / kernel.file_name(MACHINE, variant))
        assert origin == f"shipped, for {variant.title}"
        return identity

    identities = set()
    for variant in OWN:
        monkeypatch.setattr(kernel, "processor_features", lambda v=variant: frozenset(v.features))
        identities.add(find_kernel(found))
    assert len(identities) == len(OWN)  # so that ranks with different ones do without


def test_what_cannot_be_loaded_gives_way_to_the_next(
    installed: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("hvdlite"), "propagate", True)
    *faster, last = OWN
    for variant in faster:
        (installed / kernel.file_name(MACHINE, variant)).write_text("no library")
    assert find_kernel(open_library)[0] == kernel.file_name(MACHINE, last)
    for variant in faster:
        assert f"{installed / kernel.file_name(MACHINE, variant)} cannot be loaded" in caplog.text


def test_where_nothing_can_be_loaded_it_says_why(installed: Path) -> None:
    for variant in OWN:
        (installed / kernel.file_name(MACHINE, variant)).write_text("no library")
    with pytest.raises(BuildError, match=r"shipped .* cannot be loaded .*and there is no \$CXX"):
        find_kernel(open_library)


def test_a_library_of_other_sources_is_not_loaded(installed: Path) -> None:
    with (installed.parent / "shm.cc").open("a") as source:
        source.write("// changed\n")
    kernel.digest.cache_clear()
    with pytest.raises(BuildError, match=r"ships none for its sources .* and there is no"):
        find_kernel(open_library)


def test_where_nothing_is_shipped_this_machine_compiles(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ready,) = installed.glob("*-baseline-*.so")
    ready.rename(installed.parent / "ready.so")
    shutil.rmtree(installed)
    compiler = Compiler(installed.parent, f'cp "{installed.parent}/ready.so" "$2"')
    monkeypatch.setenv("CXX", str(compiler.path))
    name, origin = find_kernel(open_library)
    assert name.startswith("shm-")
    assert origin == "compiled on this machine, as this installation ships none"


# -- what is in them


@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump")
@pytest.mark.skipif(MACHINE != "x86_64", reason="these are instructions of x86-64")
@pytest.mark.parametrize(
    "name, never, some",
    [
        ("baseline", r"%[yz]mm|\tv[a-z]", r"%xmm"),
        ("avx2", r"%zmm|\tvfn?m(add|sub)", r"%ymm"),
        ("avx512", r"\tvfn?m(add|sub)", r"%zmm|%ymm\d+\{|%ymm(1[6-9]|2|3)"),
    ],
)
def test_a_variant_has_no_instruction_that_its_processors_may_lack(
    shipped: Path, name: str, never: str, some: str
) -> None:
    """Nor one that adds what it has not rounded."""
    (path,) = shipped.glob(f"*-{name}-*.so")
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(f".*(?:{never}).*", text)[:3] == []
    assert re.search(some, text)


# -- on another machine


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="there is no qemu-aarch64")
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_aarch64_gives_the_same_bits(aarch64_wheel: Path, tmp_path: Path) -> None:
    """The library of the wheel can be loaded, and what is compiled like it adds as numpy does."""
    with zipfile.ZipFile(aarch64_wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        shared = archive.extract(name, tmp_path)
    (variant,) = kernel.VARIANTS["aarch64"]
    source, program = Path(__file__).with_name("kernel_sums.cc"), tmp_path / "sums"
    command = [cross_compiler("aarch64"), *variant.flags, "-I", kernel.FOLDER, source, "-ldl"]
    subprocess.run([*command, "-o", program], check=True, timeout=HANG_SECONDS)
    for dtype in FLOATS:
        for members in (2, 3):
            parts = hard_numbers(dtype, members, 5001)
            run = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", program, shared, dtype]
            run += [str(parts[0].nbytes), str(parts.itemsize), str(members), "0.7", str(1 / 3)]
            done = subprocess.run(
                run, input=parts.tobytes(), capture_output=True, timeout=HANG_SECONDS, check=False
            )
            assert done.returncode == 0, done.stderr
            result = np.frombuffer(done.stdout, parts.dtype)
            assert_same_numbers(result, expected_sum(parts, Reduction(ReduceOp.SUM, 0.7, 1 / 3)))
