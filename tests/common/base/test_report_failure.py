"""What the launcher and the other ranks are told of the exception that ends a rank."""

from __future__ import annotations

import sys

import pytest

from hvdlite.common.base import report_failure


def test_a_long_text_keeps_its_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow says where an operation was made before it says what has happened."""
    monkeypatch.setattr(report_failure, "_reasons", [""])
    monkeypatch.setenv(report_failure.EVENTS_VARIABLE, "token 1 -")
    frames = "".join(f'File "step.py", line {line}\n' for line in range(1000))
    report_failure.report(RuntimeError(f"Graph execution error: {frames}ranks disagree on shape"))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("token raised 1 own RuntimeError: Graph execution error: File")
    assert line.endswith("ranks disagree on shape") and len(line) < 700


def test_an_error_of_an_interactive_session_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_failure, "_reasons", [""])
    monkeypatch.delenv(report_failure.EVENTS_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    report_failure.report(ValueError("a typing error"))
    assert report_failure.reason_of_end() == ""
    monkeypatch.delattr(sys, "ps1")
    report_failure.report(ValueError("no data"))
    assert report_failure.reason_of_end() == "has ended by ValueError: no data"
