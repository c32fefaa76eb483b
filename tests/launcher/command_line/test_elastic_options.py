"""The flags of elastic jobs: what they mean, and what contradictions get."""

from __future__ import annotations

import pytest

from hvdlite.launcher.command_line.job_kinds import ElasticOptions
from tests.launcher.command_line.test_options import error, options


def elastic(*words: str, **environ: str) -> ElasticOptions:
    found = options(*words, environ=environ).elastic
    assert found is not None
    return found


def test_min_np_or_a_script_makes_a_job_elastic() -> None:
    assert options("-np", "2").elastic is None
    assert options("-np", "2", "-H", "a:2").elastic is None
    assert elastic("-np", "3", "--min-np", "2") == ElasticOptions(num_proc=3, min_np=2)
    assert elastic("-np", "3", "--min-num-proc", "2").min_np == 2
    script = elastic("-np", "3", "--host-discovery-script", "./hosts.sh")
    assert script == ElasticOptions(num_proc=3, min_np=3, discovery_script="./hosts.sh")


def test_all_flags() -> None:
    words = (
        "-np 4 --min-np 2 --max-np 8 --slots-per-host 3 --elastic-timeout 20 --reset-limit 0 "
        "--blacklist-cooldown-range 10 100 --host-discovery-script ./hosts.sh"
    )
    assert elastic(*words.split()) == ElasticOptions(
        num_proc=4, min_np=2, max_np=8, slots_per_host=3, elastic_timeout=20.0, reset_limit=0,
        cooldown=(10, 100), failures_by_host=True,
        discovery_script="./hosts.sh",
    )  # fmt: skip
    assert elastic("-np", "4", "--min-np", "2", "--max-num-proc", "5").max_np == 5


def test_agents_start_the_ranks_whatever_there_is() -> None:
    lsf = {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 2 b 2"}
    in_lsf = options("-np", "2", "--min-np", "1", environ=lsf)
    assert in_lsf.launcher == "ssh"
    assert list(map(str, in_lsf.hosts)) == ["a:2", "b:2"]
    found = options("-np", "2", "--host-discovery-script", "x", environ=lsf)
    assert (found.hosts, found.allocation) == ((), None)


@pytest.mark.parametrize(
    ("words", "num_proc"),
    [
        ("--min-np 2 --host-discovery-script x", 2),
        ("--host-discovery-script x", 1),
        ("--min-np 1 -H a:2,b:3", 5),
        ("--min-np 1 --max-np 4 -H a:2,b:3", 4),
    ],
)
def test_np_may_be_left_out(words: str, num_proc: int) -> None:
    assert options(*words.split()).num_proc == num_proc


@pytest.mark.parametrize(
    "flag",
    ["--max-np 3", "--slots-per-host 2", "--elastic-timeout 9", "--reset-limit 1",
     "--blacklist-cooldown-range 1 2"],
)  # fmt: skip
def test_what_only_an_elastic_job_knows_is_refused_in_another_one(flag: str) -> None:
    said = error("-np", "2", *flag.split())
    assert said.startswith(f"{flag.split(maxsplit=1)[0]} needs --min-np or --host-discovery-script")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-np 2 --min-np 3", "--min-np 3 is more than -np 2"),
        ("-np 4 --min-np 2 --max-np 3", "--max-np 3 is less than -np 4"),
        ("-np 5 --min-np 2 -H a:2,b:2", "-np 5 asks for more ranks than the 4 slots"),
        ("-np 2 --min-np 0", "--min-np"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 0 5", "--blacklist-cooldown-range 0 5"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 9 5", "--blacklist-cooldown-range 9 5"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 1 3601", "from 1 to 3600"),
        ("-np 2 --host-discovery-script x -H a:2", "--hosts"),
        ("-np 2 --host-discovery-script x --hostfile y", "--hostfile"),
        ("-np 2 --min-np 1 --mpi", "without MPI"),
        ("-np 2 --min-np 1 --mpi-args=-v", "without MPI"),
        ("-np 2 --min-np 1 --transport mpi", "without MPI"),
        ("-np 2 --min-np 1 --launcher mpirun", "--launcher mpirun"),
        ("-np 2 --min-np 1 --torchrun-env", "--torchrun-env"),
        ("-np 2 --min-np 1 --debug-rank 0", "--debug-rank"),
        ("-np 2 --min-np 1 --elastic-timeout=-1", "--elastic-timeout"),
    ],
)
def test_contradictions_name_the_flag(words: str, said: str) -> None:
    assert said in error(*words.split())


def test_settings_come_from_the_environment() -> None:
    found = elastic(
        "-np", "2", "--min-np", "1",
        HOROVOD_ELASTIC_TIMEOUT="33", HVDLITE_ELASTIC_HOST_TIMEOUT="0.5",
        HVDLITE_ELASTIC_WORKER_TIMEOUT="4",
    )  # fmt: skip
    assert (found.elastic_timeout, found.host_timeout_seconds) == (33, 0.5)
    assert (found.worker_timeout_seconds, found.admit) == (4, "ready")


def test_scripts_for_horovod_wait_for_new_hosts() -> None:
    words = ("-np", "2", "--min-np", "1", "--as-horovod")
    assert elastic(*words).admit == "wait"


def test_a_setting_of_earlier_versions_says_what_holds_instead() -> None:
    said = error("-np", "2", "--min-np", "1", environ={"HVDLITE_ELASTIC_ADMIT": "ready"})
    assert "HVDLITE_ELASTIC_ADMIT is a setting no more: " in said and "--as-horovod" in said
