"""The scripts of docs/howto/ray.md run, and print what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts_of_pages import check, scripts

SCRIPTS = scripts("ray")


@pytest.mark.torch
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_the_scripts_of_the_page(number: int, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    check(*SCRIPTS[number], tmp_path)


def test_the_page_has_scripts() -> None:
    assert len(SCRIPTS) == 3
