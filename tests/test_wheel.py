"""The wheels and the sdist have all that belongs to the package, and nothing else."""

from __future__ import annotations

import platform
import re
import tarfile
import zipfile
from email import message_from_bytes, policy
from email.message import Message
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvdlite.common.collectives.native import kernel
from hvdlite.common.collectives.native.compiler import find_compiler
from tests.compilers import Compiler
from tests.wheel import (
    MOVED,
    ROOT,
    build,
    package_files,
    renamed,
    repair,
    show,
    source_files,
)

SHIPPED = "hvdlite/common/collectives/native/shipped/"
needs_auditwheel = pytest.mark.skipif(
    find_spec("auditwheel") is None, reason="the extra 'test' is not installed"
)


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        files = {each.filename for each in archive.infolist() if not each.is_dir()}
        return {name for name in files if ".dist-info/" not in name}


def shipped_in(wheel: Path) -> set[str]:
    """The names of the compiled libraries."""
    return {name[len(SHIPPED) :] for name in names(wheel) if name.startswith(SHIPPED)}


def shipped_for(machine: str) -> set[str]:
    """The names of the libraries that the wheel for a machine should have."""
    return {kernel.file_name(machine, variant) for variant in kernel.VARIANTS[machine]}


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    assert {name for name in names(wheel) if not name.startswith(SHIPPED)} == package_files()


def test_the_wheel_has_the_bytes_of_the_checkout(wheel: Path) -> None:
    back = {new: old for old, new in MOVED.items()}
    with zipfile.ZipFile(wheel) as archive:
        for name in package_files():
            assert archive.read(name) == (ROOT / renamed(name, back)).read_bytes(), name


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_with_a_compiler_the_wheel_is_for_this_platform_and_has_the_kernel(wheel: Path) -> None:
    machine = platform.machine()
    assert wheel.name.endswith(f"-py3-none-linux_{machine}.whl")
    assert shipped_in(wheel) == shipped_for(machine)
    assert metadata_of(wheel, "WHEEL")["Root-Is-Purelib"] == "false"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="others have one variant")
@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_a_compiler_that_does_not_know_a_variant_makes_the_others(
    wheel: Path, unpacked_sdist: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        ready = archive.extract(SHIPPED + min(shipped_in(wheel)), tmp_path)
    old = f'case "$all" in *-mavx512f*) echo unknown >&2; exit 1;; esac; cp "{ready}" "$2"'
    compiler = Compiler(tmp_path, old)
    built = build("wheel", unpacked_sdist, tmp_path / "dist", CXX=str(compiler.path))
    assert compiler.calls == 3
    assert shipped_in(built) == {name for name in shipped_for("x86_64") if "avx512" not in name}


def test_a_library_for_another_machine_is_none_for_this_one(aarch64_wheel: Path) -> None:
    with zipfile.ZipFile(aarch64_wheel) as archive:
        library = archive.read(SHIPPED + min(shipped_in(aarch64_wheel)))
    assert kernel.is_library_for("aarch64", library)
    assert not kernel.is_library_for("x86_64", library)
    assert not kernel.is_library_for("aarch64", b"")


def test_without_a_compiler_the_wheel_is_pure(pure_wheel: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    assert names(pure_wheel) == package_files()


def test_an_editable_install_is_pure(unpacked_sdist: Path, tmp_path: Path) -> None:
    """Its user changes the sources: what is compiled must follow them."""
    editable = build("editable", unpacked_sdist, tmp_path)
    assert editable.name.endswith("-py3-none-any.whl")
    assert shipped_in(editable) == set()
    assert not (unpacked_sdist / SHIPPED).exists()


def test_the_sdist_has_nothing_that_is_compiled(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is None or file.read(4) != b"\x7fELF", member.name


@needs_auditwheel
@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_the_wheel_of_a_release_runs_on_every_linux_with_glibc(wheel: Path, tmp_path: Path) -> None:
    repaired = repair(wheel, tmp_path)
    machine = platform.machine()
    assert re.search(rf"-py3-none-[a-z0-9_.]*\bmanylinux_2_17_{machine}\b", repaired.name)
    assert shipped_in(repaired) == shipped_for(machine)


@needs_auditwheel
def test_a_release_is_compiled_for_aarch64_too(aarch64_wheel: Path, tmp_path: Path) -> None:
    repaired = repair(aarch64_wheel, tmp_path)
    assert re.search(r"-py3-none-[a-z0-9_.]*\bmanylinux_2_17_aarch64\b", repaired.name)
    assert shipped_in(repaired) == shipped_for("aarch64")
    assert '"manylinux_2_17_aarch64"' in show(repaired)


def test_the_sdist_has_the_tests_the_docs_and_the_examples(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    hidden = {name for name in source_files() if name.startswith(".")}
    assert set(source_files()) - packed - hidden == set()


def metadata_of(wheel: Path, file: str = "METADATA") -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(f".dist-info/{file}"))
        return message_from_bytes(archive.read(name), policy=policy.default)


def test_the_readme_works_without_the_repository_around_it(wheel: Path) -> None:
    shown = str(metadata_of(wheel).get_payload())
    written = (ROOT / "README.md").read_text()
    targets, own = (re.findall(r"\]\(([^)\s]+)", text) for text in (shown, written))
    assert len(targets) == len(own) > 10
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    for before, after in zip(own, targets, strict=True):
        place = re.sub(r"^https://github.com/hvdlite/hvdlite/(blob|raw)/main/", "", after)
        assert place == before
        assert place.startswith(("https://", "#")) or (ROOT / place.partition("#")[0]).exists()
        assert not after.endswith(".png") or "/raw/" in after
    assert metadata_of(wheel)["Description-Content-Type"] == "text/markdown"


def test_the_metadata_names_the_project(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    labels = {url.partition(",")[0] for url in metadata.get_all("Project-URL", [])}
    assert labels >= {"Homepage", "Documentation", "Source", "Changelog"}
    assert metadata["Keywords"] and metadata.get_all("Classifier")
    assert metadata["Requires-Python"] == ">=3.10"
