"""Slurm's lists of hosts and of tasks: what they stand for, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.meeting.nodelist import expand_counts, expand_nodelist

LISTS = {
    "": [],
    "a": ["a"],
    "a,b.example.org": ["a", "b.example.org"],
    "node[03-05,7],login": ["node03", "node04", "node05", "node7", "login"],
    "n[1]-ib,b": ["n1-ib", "b"],
    "x-[098-101]": ["x-098", "x-099", "x-100", "x-101"],
    "n[8-11]": ["n8", "n9", "n10", "n11"],
    "r[1-2]n[01-02]": ["r1n01", "r1n02", "r2n01", "r2n02"],
    "n[3,1-2]": ["n3", "n1", "n2"],
}


@pytest.mark.parametrize(("text", "names"), LISTS.items())
def test_a_list_of_hosts(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == tuple(names)


@pytest.mark.skipif(not shutil.which("scontrol"), reason="Slurm is not installed")
@pytest.mark.parametrize("text", [text for text in LISTS if text and "]-" not in text])
def test_slurm_reads_it_alike(text: str, tmp_path: Path) -> None:
    """scontrol needs no cluster, but a file that describes one; it knows no text after brackets."""
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        capture_output=True, text=True, timeout=20, check=True,
        env={**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")},
    )  # fmt: skip
    assert expand_nodelist(text) == tuple(done.stdout.split())


@pytest.mark.parametrize("text", [
    "n[1-2", "n]1[", "n[]", "n[2-1]", "n[a-b]", "n[1-]", "n[-1]", "n[1,,2]", ",a", "a,", "a b",
    "n[0-99999999]", "n[[1]]",
])  # fmt: skip
def test_what_is_no_list_is_refused_and_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="not understood") as error:
        expand_nodelist(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("", []), ("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("2,1,2", [2, 1, 2]), ("1(x2),3", [1, 1, 3])],
)
def test_numbers_of_tasks(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == tuple(counts)


@pytest.mark.parametrize("text", ["x", "2(3)", "2(x)", "2,", "-1", "2(x99999999)"])
def test_what_is_no_number_of_tasks_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not understood"):
        expand_counts(text)


@given(st.text(alphabet="ab0129[],-(x) ", max_size=16))
def test_any_text_gives_names_or_the_error(text: str) -> None:
    for expand in (expand_nodelist, expand_counts):
        try:
            expand(text)  # type: ignore[operator]
        except ConfigError:
            continue
