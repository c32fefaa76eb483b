"""Ranks on several hosts, which agents start: what a user relies on, and whatever is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hvdlite.launcher.agents.channel import VERSION
from hvdlite.launcher.command_line.flags import parse_args
from hvdlite.launcher.command_line.options import resolve
from hvdlite.launcher.hosts.resources import cores
from hvdlite.launcher.hosts.ssh import MOST_AT_ONCE
from hvdlite.launcher.jobs.passed_variables import CALL_VARIABLE
from hvdlite.launcher.jobs.start import run_job
from tests.forks import NUMPY, forks
from tests.launcher.jobs import IMPATIENT, LAUNCHER, MARK, launch, processes, start, wait_until_up
from tests.launcher.other_hosts import HAVE_NAMES, agents, calls, make_ssh, python
from tests.limits import patient
from tests.parallel.jobs import environment

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.timeout(180),
]
HOSTS = ("-np", "3", "--no-check-hosts", "-H", "localhost:1,other:2")
END_SECONDS = patient(20.0)
SLEEP = "print('up', flush=True)\ntime.sleep(600)"


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    """Variables by which a job finds a program in the place of ssh."""
    return make_ssh(tmp_path)


@contextlib.contextmanager
def up(
    variables: dict[str, str],
    folder: Path,
    script: str = SLEEP,
    may_leave: str = "",
    program: Sequence[str] = LAUNCHER,
) -> Iterator[subprocess.Popen[str]]:
    """Start a job, and wait until each rank is up; its processes have the mark `folder`."""
    mark = {MARK: str(folder)}
    options = {"may_leave": may_leave, **variables, **mark}
    with start(*HOSTS, *python(script), program=program, **options) as process:
        wait_until_up(process, 3)
        yield process


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# -- what ranks get


def test_ranks_fill_the_hosts_in_their_order_and_know_their_place(ssh: dict[str, str]) -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    script = f"print('at', *(os.environ['HVDLITE_' + n] for n in {names}), os.uname().nodename)"
    words = ("-np", "6", "--no-check-hosts", "-H", "localhost:2,b:1,c:3,unused:4")
    done = launch(*words, *python(script), **ssh)
    here = os.uname().nodename
    placed = [here, here, "b", "c", "c", "c"] if HAVE_NAMES else [here] * 6
    numbers = ["0 6 0 2 0 3", "1 6 1 2 0 2", "2 6 0 1 1 3", "3 6 0 3 2 3", "4 6 1 3 1 2",
               "5 6 2 3 0 1"]  # fmt: skip
    lines = sorted(line.partition(":at ")[2] for line in done.stdout.splitlines())
    assert lines == [f"{n} {name}" for n, name in zip(numbers, placed, strict=True)]
    assert (done.returncode, done.stderr) == (0, "")


def test_the_environment_travels_in_the_channel(ssh: dict[str, str], tmp_path: Path) -> None:
    script = "print(os.environ['TOKEN'], os.getcwd(), 'TMPDIR' in os.environ, sys.stdin.read())"
    variables = {"TOKEN": "a 'b\"c\n$d", **ssh}
    done = launch(*HOSTS, *python(script), **variables)
    there = {"False"} if "TMPDIR" not in os.environ else {"False", "True"}
    assert done.stdout.count(f"$d {os.getcwd()} True") >= 1  # this host
    assert done.stdout.count(f"$d {os.getcwd()} ") == 3, there
    (call,) = calls(tmp_path)
    assert "TOKEN" not in call
    assert "SECRET" not in call
    assert "BatchMode=yes" in call


def test_ranks_there_do_not_get_the_python_path_of_their_agent(tmp_path: Path) -> None:
    """The agent finds this hvdlite by it, which is nothing for the user's scripts."""
    variables = environment(**make_ssh(tmp_path))
    del variables["PYTHONPATH"]
    code = "import os; print(os.environ.get('PYTHONPATH'))"
    words = ("-np", "1", "--no-check-hosts", "-H", "other:1", sys.executable, "-S", "-c", code)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = forks(*NUMPY)([*LAUNCHER, *words], env=variables, **pipes)
    assert process.communicate(timeout=patient(30)) == ("[0]<stdout>:None\n", "")


def test_a_large_call_takes_little_memory_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host gets the whole file, this one by its name; the launcher holds parts of it."""
    size = 1 << 25
    call = tmp_path / "call"
    call.mkdir()
    with (call / "call.pickle").open("wb") as file:
        file.truncate(size)
    monkeypatch.setenv("PATH", make_ssh(tmp_path)["PATH"])
    script = (
        f"path = os.environ['{CALL_VARIABLE}'] + '/call.pickle'\n"
        "sys.exit(0 if (os.path.getsize(path), os.path.islink(path)) == "
        f"({size}, rank == 0) else 9)"
    )
    words = ("-np", "3", "--no-check-hosts", "-H", "localhost:1,b:1,c:1", *python(script))
    options = replace(resolve(parse_args(list(words)), os.environ), call=str(call))
    tracemalloc.start()
    try:
        outcome = run_job(options, os.environ)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (outcome.code, outcome.sentence) == (0, "")
    assert peak < 1 << 23


def test_flags_of_ssh_are_passed_on(tmp_path: Path) -> None:
    variables = make_ssh(tmp_path)
    key = tmp_path / "key"
    key.touch()
    launch("--ssh-port", "2222", "--ssh-identity-file", str(key), *HOSTS, "true", **variables)
    (call,) = calls(tmp_path)
    assert f" -p 2222 -i {key} -- other " in f" {call} "


def test_threads_are_those_of_the_host_of_the_rank(tmp_path: Path) -> None:
    if cores() < 2:
        pytest.skip("one core everywhere")
    variables = make_ssh(tmp_path, before="set -- \"taskset -c 0 sh -c '$*'\"")
    words = ("-np", "2", "--no-check-hosts", "-H", "localhost:1,other:1")
    script = "print('threads', os.environ['OMP_NUM_THREADS'])"
    done = launch(*words, *python(script), **variables, OMP_NUM_THREADS="")
    threads = sorted(line.partition(":threads ")[2] for line in done.stdout.splitlines())
    assert threads == sorted([str(cores()), "1"]), done.stderr


def test_ranks_are_bound_on_request() -> None:
    if cores() < 2:
        pytest.skip("one core")
    words = ("-np", "2", "--launcher", "ssh", "--binding-args=--bind-to core")
    script = "print('on', sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    done = launch(*words, *python(script), OMP_NUM_THREADS="")
    ours, half = sorted(os.sched_getaffinity(0)), len(os.sched_getaffinity(0)) // 2
    shares = (ours[:half], ours[half : 2 * half])
    assert [f"[{r}]<stdout>:on {share}" in done.stdout for r, share in enumerate(shares)] == [
        True
    ] * 2
    done = launch("-np", "2", "--launcher", "ssh", "--binding-args=--rankfile x", "true")
    assert (done.returncode, "--bind-to core" in done.stderr) == (2, True)


REDUCE = """
import numpy as np, hvdlite.numpy as hvd
hvd.init()
assert hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum).tolist() == [6.0] * 3
if rank != 1:
    hvd.shutdown()
    hvd.init(comm=[0, 2])
    assert (hvd.size(), hvd.allreduce(np.ones(1), op=hvd.Sum).tolist()) == (2, [2.0])
print('done', hvd.cross_size())
"""


def test_ranks_of_several_hosts_meet(ssh: dict[str, str]) -> None:
    done = launch(*HOSTS, *python(REDUCE), **ssh)
    assert (done.returncode, done.stdout.count(":done")) == (0, 3), done.stderr


def test_who_does_not_come_is_named_on_every_host(ssh: dict[str, str], tmp_path: Path) -> None:
    """Rank 1 has come, although its host has not gathered all of its ranks."""
    told = tmp_path / "told"
    told.mkdir()
    script = f"""
import time
from pathlib import Path
told = Path({str(told)!r})
def wait(count):
    while len(list(told.iterdir())) < count: time.sleep(0.01)
if rank == 0: wait(1)  # It is forked, and rank 1 has to import all of it.
if rank != 2:
    import hvdlite.numpy as hvd
    (told / f"begins {{rank}}").touch()
    try: hvd.init()
    except hvd.HorovodInternalError as error: print('says', error)
    (told / str(rank)).touch()
wait(4)  # Of a rank that has ended others say more.
"""
    done = launch(*HOSTS, *python(script), HVDLITE_START_TIMEOUT="6", **ssh)
    said = [line for line in done.stdout.splitlines() if ":says" in line]
    assert len(said) == 2, done.stdout + done.stderr
    assert all(" these ranks did not come: 2 (seen: " in line for line in said), said


def test_a_shell_that_prints_before_the_agent_does_no_harm(tmp_path: Path) -> None:
    before = "head -c 100000 /dev/zero; echo welcome; echo motd >&2"
    done = launch(*HOSTS, *python("print(rank)"), **make_ssh(tmp_path, before))
    assert sorted(done.stdout.split(":")[-1] for done.stdout in done.stdout.split()) == list("012")
    assert done.stderr == ""


def test_many_hosts_are_started(tmp_path: Path) -> None:
    before = (
        f'n=$(ls "{tmp_path}/now" | wc -l); echo $n >>"{tmp_path}/most"; mkdir "{tmp_path}/now/$$"'
    )
    (tmp_path / "now").mkdir()
    variables = make_ssh(tmp_path, before)
    count = MOST_AT_ONCE + 4  # More than may connect at the same time.
    words = ("-np", str(count), "--no-check-hosts", "-H", ",".join(f"h{n}" for n in range(count)))
    done = launch(*words, "sh", "-c", "echo $HVDLITE_RANK", timeout=80, **variables)
    assert done.returncode == 0, done.stderr
    ranks = sorted(int(line.partition(":")[2]) for line in done.stdout.splitlines())
    assert ranks == list(range(count))
    assert len(calls(tmp_path)) == count


# -- failures of ranks


@pytest.mark.parametrize(
    ("end", "code", "sentence"),
    [
        ("os._exit(137)", 137, "rank 2 failed with exit code 137"),
        ("os.kill(os.getpid(), 9)", 137, "rank 2 was killed by SIGKILL"),
        ("os.killpg(0, 15)", 143, "rank 2 was killed by SIGTERM"),
        ("raise ValueError('bad')", 1, "rank 2 failed: ValueError: bad (exit code 1)"),
    ],
)
def test_a_failure_there_ends_the_job(
    ssh: dict[str, str], end: str, code: int, sentence: str
) -> None:
    script = f"sys.stderr.write('last')\nif rank == 2: {end}\n{SLEEP}"
    done = launch(*HOSTS, *python(script), program=IMPATIENT, **ssh)
    assert done.returncode == code
    assert f"hvdlite-run: {sentence}" in done.stderr
    assert "[2]<stderr>:last" in done.stderr


def test_who_waits_in_init_is_told_of_a_rank_that_has_failed(ssh: dict[str, str]) -> None:
    script = "if rank == 2: sys.exit(3)\nimport hvdlite.numpy as hvd\nhvd.init()"
    begin = time.monotonic()
    done = launch(*HOSTS, *python(script), **ssh)
    assert (done.returncode, time.monotonic() - begin < patient(20)) == (3, True)
    assert "rank 2 failed with exit code 3" in done.stderr.splitlines()[-1]
    for rank in (0, 1):
        assert f"[{rank}]<stderr>:HorovodInternalError: rank 2 failed" in done.stderr


@pytest.mark.parametrize("words", [("-np", "3"), HOSTS], ids=["one host", "two hosts"])
def test_who_waits_in_init_is_told_of_a_rank_that_has_finished(
    ssh: dict[str, str], words: tuple[str, ...]
) -> None:
    """Rank 2 never calls init. The others have met without it, and end their second init alone."""
    script = """
if rank == 2: sys.exit()
import hvdlite.numpy as hvd
hvd.init(comm=[0, 1])
hvd.shutdown()
try: hvd.init()
except hvd.HorovodInternalError as error: print('says', error.rank, error)
"""
    begin = time.monotonic()
    done = launch(*words, *python(script), HVDLITE_START_TIMEOUT="300", **ssh)
    assert (done.returncode, time.monotonic() - begin < patient(30)) == (0, True), done.stderr
    sentence = "says 2 rank 2 ended with exit code 0 without calling init()"
    assert done.stdout.count(sentence) == 2, done.stdout


@pytest.mark.parametrize("name", ["no-such-program", "/"])
def test_a_command_that_is_not_there(ssh: dict[str, str], name: str) -> None:
    done = launch(*HOSTS, name, **ssh)
    assert done.returncode == (127 if name == "no-such-program" else 126)
    assert "its command " in done.stderr
    assert name in done.stderr


def test_a_script_without_a_shell_in_its_first_line_runs(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo ran $1")
    script.chmod(0o755)
    done = launch("--launcher", "ssh", "-np", "1", str(script), "it")
    assert done.stdout == "[0]<stdout>:ran it\n"


# -- signals, and what is killed

IGNORE = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"
TWO_IGNORE = IGNORE.replace("\nfor", "\nif rank != 1:\n  for")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_ranks_everywhere(
    ssh: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    """Also those that do not obey."""
    with up(ssh, tmp_path, TWO_IGNORE + SLEEP) as process:
        process.send_signal(number)
        _, err = process.communicate(timeout=END_SECONDS)
    assert process.returncode == 128 + number
    assert f"ended by {number.name}" in err


def test_a_second_signal_ends_all_at_once(ssh: dict[str, str], tmp_path: Path) -> None:
    with up(ssh, tmp_path, IGNORE + SLEEP) as process:
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)  # two signals that come at once are one
        process.communicate(timeout=2)
    assert process.returncode == 143


def test_nothing_outlives_a_killed_launcher(ssh: dict[str, str], tmp_path: Path) -> None:
    child = "import subprocess\nsubprocess.Popen(['sleep', '600'])\n"
    with up(ssh, tmp_path, TWO_IGNORE + child + SLEEP) as process:
        process.kill()
        process.wait()
        assert wait_for(lambda: not processes(str(tmp_path)), END_SECONDS), processes(str(tmp_path))


def test_a_launcher_that_is_killed_while_ssh_connects_leaves_nothing(tmp_path: Path) -> None:
    variables = make_ssh(tmp_path, before="sleep 600")
    mark = {MARK: str(tmp_path)}
    with start(*HOSTS, "true", **variables, **mark) as process:
        assert wait_for((tmp_path / "ssh.log").exists, 20)
        process.kill()
        process.wait()

        def others() -> bool:  # the sleep is the fake's own, which a real ssh has not
            return all("sleep" in line for line in processes(str(tmp_path)).values())

        assert wait_for(others, END_SECONDS), processes(str(tmp_path))
        for number in processes(str(tmp_path)):
            os.kill(number, signal.SIGKILL)
        assert wait_for(lambda: not processes(str(tmp_path)), 20)  # its end takes a moment


@pytest.mark.parametrize("host", ["localhost", "other"])
def test_a_killed_agent_ends_its_ranks_and_the_job(
    ssh: dict[str, str], tmp_path: Path, host: str
) -> None:
    with up(ssh, tmp_path, program=IMPATIENT) as process:
        remote = [n for n in agents(str(tmp_path)) if Path(f"/proc/{n}/environ").read_bytes()]
        log = (tmp_path / "ssh.log").read_text().split()[0]
        victim = int(log) if host == "other" else next(n for n in remote if n != int(log))
        os.kill(victim, signal.SIGKILL)
        _, err = process.communicate(timeout=END_SECONDS)
    lost = (
        "rank 1 is lost with host other"
        if host == "other"
        else "rank 0 is lost with host localhost"
    )
    assert f"hvdlite-run: {lost}, which " in err
    assert process.returncode == 137


def test_a_host_that_falls_silent_is_named(ssh: dict[str, str], tmp_path: Path) -> None:
    short = {**ssh, "HVDLITE_PEER_TIMEOUT": "2"}
    with up(short, tmp_path, may_leave="hvdlite-agent-*", program=IMPATIENT) as process:
        agent = int((tmp_path / "ssh.log").read_text().split()[0])
        os.kill(agent, signal.SIGSTOP)
        _, err = process.communicate(timeout=END_SECONDS)
    assert "rank 1 is lost with host other, which has not answered for 2 seconds" in err
    assert process.returncode == 137


def test_ranks_end_where_the_launcher_falls_silent(ssh: dict[str, str], tmp_path: Path) -> None:
    with up({**ssh, "HVDLITE_PEER_TIMEOUT": "2"}, tmp_path) as process:
        agent = int((tmp_path / "ssh.log").read_text().split()[0])
        process.send_signal(signal.SIGSTOP)

        def ranks() -> list[str]:
            return [line for line in processes(str(tmp_path)).values() if "time.sleep" in line]

        assert len(ranks()) == 4  # three and the launcher
        assert wait_for(lambda: len(ranks()) == 2, END_SECONDS), (
            ranks()
        )  # that of this host goes on
        assert wait_for(lambda: agent not in agents(str(tmp_path)), END_SECONDS)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=END_SECONDS)
    assert "lost with host other" in err


def test_output_that_nobody_reads_for_long_ends_no_rank(ssh: dict[str, str]) -> None:
    script = "print('x' * 3_000_000); print('end', flush=True)"
    with start(*HOSTS, *python(script), HVDLITE_PEER_TIMEOUT="2", **ssh) as process:
        time.sleep(4)  # it is the reader who is slow
        out, err = process.communicate(timeout=END_SECONDS)
    assert (process.returncode, err, out.count(":end\n")) == (0, "", 3)


# -- hosts that cannot be used


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("echo 'Host key verification failed.' >&2; exit 255", "ssh-keyscan other"),
        ("exec {python} -I -S -m hvdlite.launcher.agent_process.agent", "not installed"),
        ("echo 'a riddle' >&2; exit 3", "said: a riddle"),
    ],
)
def test_a_host_that_cannot_be_used_is_one_sentence(tmp_path: Path, there: str, said: str) -> None:
    done = launch(*HOSTS, "true", **make_ssh(tmp_path, there.format(python=sys.executable)))
    assert done.returncode == 1
    assert done.stderr.startswith("hvdlite-run: host other cannot be used: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_agent_that_is_not_needed_any_more_leaves_no_folder(tmp_path: Path) -> None:
    # ssh fails in the moment in which the agent of this host has made its folder.
    no_key = "echo 'Host key verification failed.' >&2; exit 255"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # whose name is short enough for it
        wait = f"until [ -e {folder}/hvdlite-agent-* ]; do :; done"
        done = launch(*HOSTS, "true", TMPDIR=folder, **make_ssh(tmp_path, f"{wait}; {no_key}"))
        left = os.listdir(folder)
    assert "ssh-keyscan other" in done.stderr
    assert left == []


def test_a_host_that_hangs_in_ssh_is_named_in_time(tmp_path: Path) -> None:
    variables = make_ssh(tmp_path, before="exec sleep 600")
    begin = time.monotonic()
    done = launch("--start-timeout", "1", *HOSTS, "true", **variables)
    assert time.monotonic() - begin < 40
    assert done.returncode == 1
    assert "on other had not started after 1 seconds (--start-timeout)" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_working_directory_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = make_ssh(tmp_path, before=f"rmdir '{tmp_path}/work'")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    words = ("-np", "1", "--no-check-hosts", "-H", "other:1")
    done = launch(*words, "true", **variables)
    assert done.returncode == 1
    assert f"host other cannot enter {tmp_path}/work" in done.stderr
    assert "Remedy: make the same folder there" in done.stderr


def test_more_ranks_than_listed_devices() -> None:
    words = ("-np", "3", "--gpus-per-rank", "1", "true")
    done = launch(*words, CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode == 1
    assert "the rank with local rank 2 needs device 2 of this host" in done.stderr
    assert "CUDA_VISIBLE_DEVICES=0,1 lists 2: start fewer ranks on the host" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_elastic_job_may_have_more_slots_than_listed_devices() -> None:
    words = ("-np", "1", "--min-np", "1", "--max-np", "1", "-H", "localhost:2")
    say = ("sh", "-c", "echo device $CUDA_VISIBLE_DEVICES")
    done = launch(*words, "--gpus-per-rank", "1", *say, CUDA_VISIBLE_DEVICES="5")
    assert done.returncode == 0
    assert "device 5" in done.stdout


def test_an_elastic_job_that_uses_more_slots_than_listed_devices() -> None:
    words = ("-np", "2", "--min-np", "2", "-H", "localhost:2", "--elastic-timeout", "600")
    done = launch(*words, "--gpus-per-rank", "1", "true", CUDA_VISIBLE_DEVICES="5")
    assert done.returncode == 1
    given_up, end = done.stderr.splitlines()
    why = "it cannot start its ranks: --gpus-per-rank 1: the rank with local rank 1 needs device 1"
    assert given_up.startswith(f"hvdlite-run: host localhost is given up for good: {why}")
    assert end.startswith("hvdlite-run: the job could not start: ") and end.count(why) == 1


STUB = """\
import sys, time
from hvdlite.common.connections.frames import frame, pack
from hvdlite.launcher.agents.channel import PROLOGUE
sys.stdout.buffer.write(PROLOGUE + frame(pack(["hello", {hello}])))
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        ({"channel": 999, "python": [3, 12], "folder": ""}, "another version of hvdlite"),
        (
            {"channel": VERSION, "python": [2, 7], "folder": ""},
            "has Python 2.7, and the function comes",
        ),
    ],
)
def test_an_agent_of_another_version_is_named(
    tmp_path: Path, hello: dict[str, object], said: str
) -> None:
    (tmp_path / "stub.py").write_text(STUB.format(hello=hello))
    (tmp_path / "call").mkdir()
    variables = make_ssh(tmp_path, before=f"exec {sys.executable} {tmp_path}/stub.py")
    environ = {**os.environ, **variables}
    options = resolve(parse_args(["--no-check-hosts", "-H", "other:1", "true"]), environ)
    outcome = run_job(replace(options, call=str(tmp_path / "call")), environ)
    assert outcome.code == 1
    assert said in outcome.sentence
    assert outcome.sentence.startswith("host other has ")
