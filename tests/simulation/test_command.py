"""The command that replays seeds: a story, or the smallest program that breaks as the seed does."""

from __future__ import annotations

import os
import sys

import pytest

from tests.simulation.__main__ import main
from tests.simulation.known_bugs import ELASTIC_BUGS


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the command prints, and its exit code as the last word."""
    monkeypatch.setattr(sys, "argv", ["simulation", *words])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _process, _cores: None)
    code = main()
    return f"{capsys.readouterr().out}{code}"


def test_a_seed_is_told_as_a_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    story = run(monkeypatch, capsys, "--seed", "144")
    assert story == run(monkeypatch, capsys, "--seed", "144")
    assert story.splitlines()[-1] == "0"
    assert any(" ms  rank 0 " in line and line.endswith(" ends") for line in story.splitlines())


def test_a_seed_that_breaks_is_told_as_the_smallest_program_that_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ELASTIC_BUGS["a worker starts where another one has not ended"]():
        counted = run(monkeypatch, capsys, "--world", "elastic", "--seeds", "12..14")
        story = run(monkeypatch, capsys, "--world", "elastic", "--seed", "13")
    assert "2 seeds of elastic, 1 broken" in counted
    assert counted.splitlines()[-1] == "1"
    lines = story.splitlines()
    assert lines[-1] == "1"
    assert "seed 13 breaks an invariant. The smallest program that still does:" in lines
    assert " ms  world " in lines[-2]  # Who broke it comes last, with the invariant.
    assert "a slot has one process" in lines[-2]
