"""The scripts of docs/howto/spark.md run, and print what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts_of_pages import check, scripts
from tests.spark.sessions import need_spark

SCRIPTS = scripts("spark")


@pytest.mark.torch
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_the_scripts_of_the_page(number: int, tmp_path: Path) -> None:
    need_spark()
    check(*SCRIPTS[number], tmp_path)


def test_the_page_has_scripts() -> None:
    assert len(SCRIPTS) == 2
