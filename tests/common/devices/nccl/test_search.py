"""Which NCCL is taken, and what is said where there is none, or one that is of no use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.devices.nccl import binding
from hvdlite.common.devices.nccl.binding import (
    OLDEST,
    UNIQUE_ID_BYTES,
    MissingLibraryError,
    Nccl,
    NcclError,
    Wanted,
    load,
)
from hvdlite.common.devices.nccl.cudart import CudaRuntime
from tests.common.devices.nccl.conftest import compiled
from tests.common.devices.nccl.fake import Fake, run_members
from tests.limits import HANG_SECONDS

MISSING = Wanted("NCCL", ("libnccl_of_nobody.so.2",), "HVDLITE_NCCL_LIBRARY")


def test_a_missing_library_says_what_to_install() -> None:
    with pytest.raises(MissingLibraryError, match=r"NCCL is not here .*HVDLITE_NCCL_LIBRARY"):
        load(MISSING)


def test_a_file_that_is_chosen_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"HVDLITE_NCCL_LIBRARY=.*none\.so.*cannot open"):
        Nccl(str(tmp_path / "none.so"))


def test_another_library_is_refused(fake: Fake) -> None:
    with pytest.raises(NcclError, match="has no function ncclGetVersion"):
        Nccl("libc.so.6")


def test_an_old_release_is_refused(fake: Fake) -> None:
    fake.c.fake_version(20804)
    with pytest.raises(NcclError, match=r"is NCCL 2\.8\.4, and hvdlite needs 2\.11\.0 or later"):
        Nccl(fake.path)


def test_the_version_is_read(fake: Fake) -> None:
    fake.c.fake_version(23004)
    nccl = Nccl(fake.path)
    assert (nccl.version, nccl.version_text, nccl.does_not_block) == (23004, "2.30.4", True)


def test_a_release_without_configurations_connects_by_blocking(tmp_path: Path) -> None:
    old = Fake(compiled(tmp_path, "libfake_nccl_old.so", "-DOLD"))
    assert not Nccl(old.path).does_not_block
    run_members(old, 2, lambda member: None)
    assert sorted(old.journal)[-2:] == ["destroy 0", "destroy 1"]


@pytest.mark.parametrize(
    ("package", "folder"), [("nvidia", "nccl/lib"), ("torch", "lib"), ("tensorflow", ".")]
)
def test_packages_bring_it(
    package: str, folder: str, fake_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages are not imported, which would take seconds."""
    place = tmp_path / package / folder
    place.mkdir(parents=True, exist_ok=True)
    name = f"libnccl_of_{package}.so.2"
    os.link(fake_path, place / name)
    roots = {package: [tmp_path / package]}
    monkeypatch.setattr(binding, "_roots", lambda wanted: roots.get(wanted, []))
    found = load(Wanted("NCCL", (name,), "HVDLITE_NCCL_LIBRARY"))
    assert Path(found.path).samefile(place / name)


def test_a_real_release_has_what_is_called() -> None:
    try:
        nccl, cuda = Nccl(), CudaRuntime()
    except MissingLibraryError as error:
        pytest.skip(str(error))
    assert nccl.version >= OLDEST
    assert "invalid argument" in nccl.error_text(4)
    assert len(nccl.unique_id()) == UNIQUE_ID_BYTES
    assert cuda.device_count() >= 0


def test_roots_are_those_of_the_packages() -> None:
    assert binding._roots("hvdlite.common") == [Path(binding.__file__).parents[2]]
    assert binding._roots("a_package_of_nobody") == []


def trial(environ: dict[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "hvdlite.tools.trials", "own_binding"]
    done = subprocess.run(
        command,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


def test_the_trial_says_what_was_found(fake: Fake) -> None:
    found = {"HVDLITE_NCCL_LIBRARY": fake.path, "HVDLITE_CUDART_LIBRARY": fake.path}
    status, text = trial(found)
    assert status == 0
    assert f"NCCL 2.27.3 ({fake.path}) for 8 of cuda, with HVDLITE_DEVICES=nccl" in text


def test_the_trial_says_what_is_missing(fake: Fake) -> None:
    status, text = trial({"HVDLITE_NCCL_LIBRARY": "/none/libnccl.so.2"})
    assert status == 1
    assert "HVDLITE_NCCL_LIBRARY=/none/libnccl.so.2" in text
