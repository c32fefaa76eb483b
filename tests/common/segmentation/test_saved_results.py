"""Files of segments that an earlier run has found."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.segmentation import saved_results as learned
from hvdlite.common.segmentation.strategies import Gradient
from hvdlite.common.settings.config import Config
from tests.common.segmentation.machine import coarse_resnet
from tests.ranks import run_ranks


def test_a_file_goes_round(tmp_path: Path) -> None:
    path = str(tmp_path / "learned.json")
    gradients = coarse_resnet(24)
    assert learned.load(path, gradients) is None  # not there: as good as empty
    learned.save(path, [3, 9, 23], gradients)
    learned.save(path, [4, 9, 23], gradients)
    assert learned.load(path, gradients) == [4, 9, 23]
    assert [each.name for each in tmp_path.iterdir()] == ["learned.json"]


def test_a_file_keeps_what_several_optimizers_have_learned(tmp_path: Path) -> None:
    path = str(tmp_path / "learned.json")
    models = [coarse_resnet(pieces) for pieces in range(4, 24)]
    for gradients in models:
        learned.save(path, [1, len(gradients) - 1], gradients)
    learned.save(path, [2, 22], models[-1])
    assert learned.load(path, models[-1]) == [2, 22]
    assert learned.load(path, models[-2]) == [1, 21]
    assert learned.load(path, models[0]) is None  # long ago


@pytest.mark.parametrize(
    "other",
    [coarse_resnet(23), coarse_resnet(24)[::-1], [*coarse_resnet(24)[:-1], Gradient("x", 1, "a")]],
)
def test_a_file_of_another_model_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: list[Gradient]
) -> None:
    path = str(tmp_path / "learned.json")
    learned.save(path, [3, 23], coarse_resnet(24))
    with caplog.at_level(logging.WARNING, "hvdlite"):
        assert learned.load(path, other) is None
    assert path in caplog.text
    assert "another model" in caplog.text
    assert "tuning begins anew" in caplog.text


def with_ends(content: dict[str, Any], ends: list[Any]) -> str:
    (key, model), *_ = content["models"].items()
    return json.dumps({**content, "models": {key: {**model, "ends": ends}}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: "no json", "Expecting value"),
        (lambda content: "[]", "no segmentation"),
        (lambda content: json.dumps({**content, "version": 7}), "version 7"),
        (lambda content: json.dumps({**content, "models": [3]}), "[3] are none"),
        (lambda content: with_ends(content, [3]), "[3] are no ends"),
        (lambda content: with_ends(content, [3.5, 23]), "whole numbers"),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, words: str
) -> None:
    path = tmp_path / "learned.json"
    gradients = coarse_resnet(24)
    learned.save(str(path), [3, 23], gradients)
    path.write_text(change(json.loads(path.read_text())))
    with caplog.at_level(logging.WARNING, "hvdlite"):
        assert learned.load(str(path), gradients) is None
    assert words in caplog.text


def test_a_file_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "nowhere" / "learned.json")
    with caplog.at_level(logging.WARNING, "hvdlite"):
        learned.save(path, [23], coarse_resnet(24))
    assert path in caplog.text


def test_a_file_of_the_settings_that_cannot_be_written_is_an_error_at_init(tmp_path: Path) -> None:
    for path, why in (
        (tmp_path / "none" / "a.json", "be a file in a folder"),
        (tmp_path, "a folder"),
    ):
        with pytest.raises(ConfigError, match=f"HVDLITE_SEGMENTATION: rank 0: {path} .*{why}"):
            run_ranks(2, lambda rank: None, config=Config(segmentation=f"auto:{path}"))


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    gradients = coarse_resnet(24)
    learned.save(str(tmp_path / "link"), [3, 23], gradients)
    assert (tmp_path / "link").is_symlink()
    assert learned.load(str(tmp_path / "target"), gradients) == [3, 23]
