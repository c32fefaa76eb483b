"""What the launcher and the other ranks are told of the exception that ends a rank."""

from __future__ import annotations

import contextlib
import json
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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(), ""),
        (SystemExit(0), ""),
        (SystemExit(3), "has been shut down after SystemExit: 3 "),
        (SystemExit("no data"), "has been shut down after SystemExit: no data "),
        (GeneratorExit(), ""),
        (StopIteration(), "has been shut down after StopIteration "),
        (ValueError("no data"), "has been shut down after ValueError: no data "),
    ],
)
def test_a_shutdown_on_the_way_out_tells_what_is_no_end_in_order(
    error: BaseException, said: str
) -> None:
    reason = "nothing"
    with contextlib.suppress(BaseException):
        try:
            raise error
        finally:
            reason = report_failure.reason_of_shutdown()
    where = f"({__file__}, line {error.__traceback__.tb_lineno})," if error.__traceback__ else ""
    assert reason == (said and said + where)
    assert report_failure.reason_of_shutdown() == ""


def test_the_line_of_an_error_is_the_script_s() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("no")
    assert caught.traceback[-1].path.name == "decoder.py"
    said = report_failure._one_line(caught.value)
    assert said.endswith(f" ({__file__}, line {caught.value.__traceback__.tb_lineno})")


@pytest.mark.parametrize("hidden", [False, True])
def test_ctrl_c_is_a_line_of_the_launcher_and_no_traceback_of_each_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, hidden: bool
) -> None:
    """Where it ends what an error has begun, such as a `finally` that hangs, the error is shown."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(report_failure, "_reasons", [""])
    monkeypatch.setenv(report_failure.EVENTS_VARIABLE, "token 1 -")
    report_failure.report_uncaught()
    try:
        try:
            if hidden:
                raise ValueError("the cause")
        finally:
            raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        sys.excepthook(type(error), error, error.__traceback__)
    line, *shown = capfd.readouterr().err.splitlines()
    assert line.startswith("token raised 1 own KeyboardInterrupt")
    assert ("ValueError: the cause" in shown) == hidden
    assert hidden or (" (" in line and "line" in line and not shown)


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
