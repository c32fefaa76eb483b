"""The wheel and the sdist have all that belongs to the package, and nothing else."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email import message_from_bytes, policy
from email.message import Message
from pathlib import Path

import pytest

from tests.wheel import (
    MOVED,
    ROOT,
    build,
    copy_of_the_checkout,
    package_files,
    renamed,
    source_files,
)

pytest.importorskip("setuptools", "77", reason="the extra 'test' is not installed")
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no git checkout")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = copy_of_the_checkout(tmp_path_factory.mktemp("source"))
    return build("sdist", source, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist: so the sdist has what a build needs."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, sdist.parent)


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    assert names(wheel) == package_files()


def test_the_wheel_has_the_bytes_of_the_checkout(wheel: Path) -> None:
    back = {new: old for old, new in MOVED.items()}
    with zipfile.ZipFile(wheel) as archive:
        for name in names(wheel):
            assert archive.read(name) == (ROOT / renamed(name, back)).read_bytes(), name


def test_the_sdist_has_the_tests_the_docs_and_the_examples(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    hidden = {name for name in source_files() if name.startswith(".")}
    assert set(source_files()) - packed - hidden == set()


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
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
