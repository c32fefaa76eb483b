"""--gpus-per-rank: what each rank sees, by the agents and by the shell of mpirun alike."""

from __future__ import annotations

import subprocess

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.hosts.resources import SETTING, SHELL, VARIABLES, visible_devices

CUDA = "CUDA_VISIBLE_DEVICES"
CASES = [
    ({SETTING: "1"}, 0, "0"),
    ({SETTING: "1"}, 3, "3"),
    ({SETTING: "2"}, 1, "2,3"),
    ({SETTING: "1", CUDA: "4,6"}, 1, "6"),
    ({SETTING: "2", CUDA: "GPU-a,GPU-b,GPU-c,GPU-d"}, 1, "GPU-c,GPU-d"),
    ({SETTING: "1", CUDA: ",4, 6 ,,7,"}, 1, "6"),
    ({SETTING: "1", CUDA: ",4, 6 ,,7,"}, 2, "7"),
]


def by_shell(environ: dict[str, str], local_rank: int) -> subprocess.CompletedProcess[str]:
    script = f"local_rank={local_rank}\n{SHELL}\n" + "".join(
        f'echo "{name}=${name}"\n' for name in VARIABLES
    )
    return subprocess.run(
        ["/bin/sh", "-c", script],
        env={"PATH": "/usr/bin:/bin", **environ}, capture_output=True, text=True, timeout=20,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("environ", "local_rank", "expected"), CASES)
def test_a_rank_sees_its_own(environ: dict[str, str], local_rank: int, expected: str) -> None:
    seen = visible_devices(environ, local_rank)
    assert seen[CUDA] == expected
    shell = dict(line.split("=", 1) for line in by_shell(environ, local_rank).stdout.splitlines())
    assert shell == seen


def test_without_the_setting_nothing_changes() -> None:
    assert visible_devices({CUDA: "3"}, 1) == {}
    assert f"{CUDA}=3" in by_shell({CUDA: "3"}, 1).stdout


@pytest.mark.parametrize(("listed", "number"), [("0,1,2", 3), ("", 0), (" , ", 0), ("0,1,,2", 3)])
def test_too_few_devices_are_an_error(listed: str, number: int) -> None:
    """Also where a variable is there and empty: for the libraries it lists none."""
    environ = {SETTING: "2", CUDA: listed}
    with pytest.raises(ConfigError, match=rf"local rank 1 needs devices 2 to 3.* lists {number}"):
        visible_devices(environ, 1)
    done = by_shell(environ, 1)
    assert done.returncode == 1
    assert "local rank 1" in done.stderr
