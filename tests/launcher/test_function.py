"""hvdlite.run: results in rank order, and exceptions that come back as themselves."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hvdlite
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.launcher import RemoteError, function_rank
from hvdlite.spark.task import Call, RankProcess
from tests.forks import set_signals
from tests.launcher.jobs import executable
from tests.limits import HANG_SECONDS
from tests.parallel.jobs import environment

pytestmark = pytest.mark.usefixtures("forked", "by_value")
each_launcher = pytest.mark.usefixtures("launcher")


def rank() -> int:
    return int(os.environ["HVDLITE_RANK"])


def train(start: int, *, step: int = 1) -> tuple[int, int, float]:
    import numpy as np

    import hvdlite.numpy as hvd

    hvd.init()
    total = hvd.allreduce(np.array([float(start + step * hvd.rank())]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), float(total[0])


@each_launcher
def test_results_come_in_rank_order() -> None:
    assert hvdlite.run(train, (10,), {"step": 2}, np=2) == [(r, 2, 22.0) for r in range(2)]


def test_one_rank_is_the_default_and_a_lambda_will_do() -> None:
    base = 5
    assert hvdlite.run(lambda x: base + x, (1,)) == [6]


class OddError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, code: int, *, text: str) -> None:
        super().__init__(text)
        self.code = code


def fail_on_rank_1(error: type[Exception]) -> None:
    import hvdlite.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise OddError(3, text="odd") if error is OddError else error("the data is broken")
    hvd.barrier()


def test_an_exception_comes_back_as_itself_with_rank_and_traceback() -> None:
    with pytest.raises(KeyError, match="the data is broken") as caught:
        hvdlite.run(fail_on_rank_1, (KeyError,), np=2)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert cause.rank == 1
    assert str(cause).startswith("on rank 1:\nTraceback")
    assert "in fail_on_rank_1" in str(cause)


def test_an_exception_that_cannot_be_pickled_is_told() -> None:
    with pytest.raises(RemoteError, match=r"on rank 1:[\s\S]*OddError: odd") as caught:
        hvdlite.run(fail_on_rank_1, (OddError,), np=2)
    assert caught.value.rank == 1


def test_a_result_that_cannot_be_pickled_is_an_exception_of_its_rank() -> None:
    with pytest.raises(TypeError, match="the function returns a lock, which cannot be sent"):
        hvdlite.run(threading.Lock)


def test_a_result_that_cannot_be_loaded_is_told() -> None:
    with pytest.raises(HorovodInternalError, match=r"result of rank 1.*OddError.*return") as caught:
        hvdlite.run(lambda: OddError(3, text="odd") if rank() else None, np=2)
    assert caught.value.rank == 1


@each_launcher
def test_a_killed_rank_is_named() -> None:
    def die() -> None:
        if rank() == 1:
            os.kill(os.getpid(), 9)
        import time

        time.sleep(600)

    with pytest.raises(HorovodInternalError, match="rank 1 was killed by SIGKILL") as caught:
        hvdlite.run(die, np=2)
    assert caught.value.rank == 1


def test_a_rank_that_exits_gives_no_result() -> None:
    with pytest.raises(HorovodInternalError, match=r"rank 0 has ended before .* by sys.exit\(\)"):
        hvdlite.run(lambda: sys.exit(0))


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="num_proc=2 contradicts np=3"):
        hvdlite.run(rank, num_proc=2, np=3)
    with pytest.raises(ValueError, match="--hostfile"):
        hvdlite.run(rank, hosts="localhost:1", hostfile="hosts")
    with pytest.raises(ValueError, match="use_gloo contradicts use_mpi"):
        hvdlite.run(rank, use_gloo=True, use_mpi=True)
    with pytest.raises(ValueError, match="HVDLITE_CYCLE_TIME"):
        hvdlite.run(rank, env={**os.environ, "HVDLITE_CYCLE_TIME": "garbage"})


@pytest.mark.parametrize(
    "given",
    [{"use_gloo": True}, {"use_mpi": True}, {"disable_cache": True}],
    ids=lambda given: next(iter(given)),
)
def test_arguments_of_horovod_run_run_the_function(
    given: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    assert hvdlite.run(rank, np=2, **given) == [0, 1]
    name = next(iter(given))
    warned = [str(each.message) for each in recwarn if "no meaning here" in str(each.message)]
    assert [text.partition(" ")[0] for text in warned] == (
        [name] if name == "disable_cache" else []
    )


def test_a_call_from_another_python_is_refused_before_it_is_unpickled(tmp_path: Path) -> None:
    origin = pickle.dumps(((3, 9), ["/no/such/path"]), protocol=2)
    (tmp_path / function_rank.CALL).write_bytes(origin + b"what would crash this Python")
    ours = ".".join(map(str, sys.version_info[:2]))
    with pytest.raises(RuntimeError, match=rf"runs Python {ours} .* comes from Python 3\.9"):
        function_rank._call(str(tmp_path))
    assert "/no/such/path" not in sys.path


def test_a_rank_that_ends_with_its_input_has_no_arguments(tmp_path: Path) -> None:
    """The function may parse those of its program."""
    call = function_rank.dump_call((lambda: sys.argv[1:], (), {}))
    (tmp_path / function_rank.CALL).write_bytes(call)
    words = [sys.executable, "-m", "hvdlite.launcher.function_rank", function_rank.WITH_INPUT]
    given = {"HVDLITE_RANK": "0", function_rank.CALL_VARIABLE: str(tmp_path)}
    with subprocess.Popen(
        words, env=environment() | given, stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.wait(60) == 0
    assert function_rank.read_answers(str(tmp_path), [0]) == {0: []}


@each_launcher
def test_large_calls_and_answers_come_whole() -> None:
    data = os.urandom(9_000_001)
    assert hvdlite.run(lambda part: part[::-1], (data,), np=2) == [data[::-1]] * 2


@each_launcher
def test_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hvdlite.run(rank, np=2)
    with pytest.raises(ZeroDivisionError):
        hvdlite.run(lambda: 1 // 0)
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import helper, hvdlite, os, sys
def f(): return helper.VALUE, __name__
if __name__ == "__main__":
    print(hvdlite.run(f, np=2))
"""


def test_functions_of_a_script_and_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 42")
    (tmp_path / "main.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")], env=environment(), cwd="/",
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.stdout == "[(42, '__main__'), (42, '__main__')]\n", done.stderr


def test_ctrl_c_is_a_keyboard_interrupt() -> None:
    script = (
        "import hvdlite, os, signal, threading\n"
        "def f():\n"
        "    import time\n"
        "    os.kill(launcher, signal.SIGINT)\n"
        "    time.sleep(600)\n"
        "launcher = os.getpid()\n"
        "try: hvdlite.run(f, np=1)\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False, preexec_fn=set_signals,
    )  # fmt: skip
    assert done.stdout == "interrupted\n", done.stderr


def test_a_task_of_spark_signals_its_rank_before_another_may_have_its_number(
    tmp_path: Path, signalled: list[int]
) -> None:
    program = executable(tmp_path / "python", "exit 3")
    call = Call(b"", {}, str(program), "", ("", 0))
    output: Any = SimpleNamespace(streams=lambda rank: {}, close=lambda: None)
    with contextlib.closing(RankProcess(call, 0, {}, output)) as process:
        assert process.answer().code == 3
        assert signalled == [process.process.pid]
