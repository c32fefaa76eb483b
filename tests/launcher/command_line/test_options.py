"""Flags, the config file and the environment: who wins, and what contradictions get."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.settings.config import Config, settings
from hvdlite.launcher.command_line.flags import IGNORED, RENAMED, make_parser, parse_args
from hvdlite.launcher.command_line.options import LaunchOptions, resolve
from hvdlite.launcher.hosts.resources import cores


def options(*words: str, environ: Mapping[str, str] | None = None) -> LaunchOptions:
    return resolve(parse_args([*words, "--", "python", "train.py", "--lr", "1"]), environ or {})


def error(*words: str, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        options(*words, environ=environ)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_command_keeps_its_own_flags() -> None:
    assert options("-np", "2").command == ("python", "train.py", "--lr", "1")
    args = parse_args(["-np", "2", "python", "train.py", "-np", "3", "--verbose"])
    assert (args.num_proc, args.verbose) == (2, False)
    assert args.command == ["python", "train.py", "-np", "3", "--verbose"]


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("python -np 2 train.py --lr 1", "hvdlite-run -np 2 python train.py --lr 1"),
        ("train.py --num-proc=2", "hvdlite-run --num-proc=2 train.py"),
        ("train.py -H a:2", "hvdlite-run -H a:2 train.py"),
        ("-np 2 python -np 2", None),
        ("-- python -v train.py", None),
        ("train.py -n 2 -np 2", None),
    ],
)
def test_flags_after_the_command_get_a_hint(words: str, right: str | None) -> None:
    notes = parse_args(words.split()).notes
    assert [note.partition("did you mean ")[2] for note in notes] == (
        [f"{right}?"] if right else []
    )


def test_without_a_number_there_is_one_rank_per_core_or_slot() -> None:
    assert options().num_proc == cores()
    assert options("-H", "localhost:3,other:4").num_proc == 7


def test_a_batch_system_gives_the_hosts_unless_flags_do() -> None:
    lsf = {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 2 b 2 c 1"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "3,2"}
    assert (options(environ=lsf).num_proc, options(environ=lsf).counts) == (5, (2, 2, 1))
    assert str(options("-np", "3", environ=lsf).hosts[-1]) == "b:2"
    assert options("-np", "3", environ=lsf).counts == (2, 1)
    assert [str(host) for host in options("-H", "x:2", environ=lsf).hosts] == ["x:2"]
    assert options("-H", "x:2", environ=lsf).allocation is None
    assert "5 slots" in error("-np", "6", environ=lsf)
    assert options(environ=slurm).num_proc == 5
    assert str(options(environ=slurm).allocation) == "Slurm's n1:3,n2:2"
    assert options("-H", "x:2", environ={"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "?"}).num_proc == 2


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5", ""])
def test_a_bad_number_of_ranks_is_refused(number: str) -> None:
    assert error(f"--num-proc={number}").startswith("-np/--num-proc: ")


@pytest.mark.parametrize("flag", sorted(IGNORED))
def test_flags_without_a_meaning_warn_and_the_command_stays_whole(flag: str) -> None:
    values, text = IGNORED[flag]
    given = options("-np", "2", flag, *["3"] * values)
    assert given.command == ("python", "train.py", "--lr", "1")
    assert given.notes == (f"{flag} has no meaning here, and is ignored: {text}",)
    without = parse_args(["-np", "2", flag, *["3"] * values, "python", "train.py"])
    assert without.command == ["python", "train.py"]


def test_old_spellings_of_flags_do_what_they_did() -> None:
    for flag, (today, _, value) in RENAMED.items():
        given = options("-np", "1", flag)
        assert given.variables == {"HVDLITE_LOG_HIDE_TIME": value}
        assert given.notes == (f"{flag} is deprecated: use {today}",)


@pytest.mark.parametrize(
    "flag", ["--bogus", "--bogus=1", "-z", "--auto", "--verb", "--host", "-c", "-host"]
)
def test_an_unknown_flag_is_named_and_none_is_abbreviated(flag: str) -> None:
    assert flag in error(flag)
    with pytest.raises(ConfigError, match="unknown flag"):
        parse_args(["-np", "2", flag, "python", "train.py"])


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--np", "-np"),
        ("-n", "-np"),
        ("-NP", "-np"),
        ("--host=a:2", "--hosts"),
        ("--verbos", "--verbose"),
        ("--fusion-treshold-mb", "--fusion-threshold-mb"),
        ("--as-horovd", "--as-horovod"),
        ("--output-file", "--output-filename"),
    ],
)
def test_a_misspelt_flag_gets_the_one_that_is_meant(flag: str, meant: str) -> None:
    wanted = f"unknown flag {flag}: did you mean {meant}?"
    assert error(flag) == wanted
    with pytest.raises(ConfigError) as caught:
        parse_args([flag, "2", "python", "train.py"])
    assert str(caught.value) == wanted


@pytest.mark.parametrize("flag", ["--zyx", "--foo", "--epochs"])
def test_a_flag_that_is_like_no_other_gets_no_guess(flag: str) -> None:
    assert error(flag) == f"unknown flag {flag}: hvdlite-run --help lists the flags"


def test_no_command_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no command"):
        resolve(parse_args(["-np", "2"]), {})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-H", "a:1", "--hostfile", "f"], "--hostfile"),
        (["--stall-check", "--no-stall-check"], "--no-stall-check"),
        (["--no-stall-check", "--stall-check-warning-time-seconds=3"], "--no-stall-check"),
        (["--no-stall-check", "--stall-check-shutdown-time-seconds=3"], "--no-stall-check"),
        (["--hierarchical-allreduce", "--allreduce=ring"], "--allreduce"),
        (["--timeline-mark-cycles"], "--timeline-filename"),
        (["--network-interface=a", "--network-interfaces=b"], "--network-interfaces"),
        (["--network-interfaces=,"], "--network-interfaces"),
        (["-np", "3", "-H", "localhost:2"], "-np 3"),
        (["-np", "3", "--thread-affinity", "0,1"], "--thread-affinity"),
        (["--mpi-args", "'open"], "--mpi-args"),
        (["--ssh-identity-file", "/nonexistent/key"], "--ssh-identity-file"),
        (["--ssh-port", "x"], "--ssh-port"),
        (["--binding-args=--bind-to core", "--mpi-args=--bind-to none"], "--binding-args"),
        (["-np", "2", "--debug-rank", "2"], "--debug-rank 2"),
        (["--debug-rank", "-1"], "--debug-rank"),
        (["-H", "localhost:1,far:2", "--debug-rank", "1"], "it runs on far"),
        (["--config-file", "/nonexistent.yaml"], "--config-file"),
        (["--start-timeout", "soon"], "--start-timeout"),
        (["--ps-snapshot", "saved"], "--ps-snapshot needs --ps-servers"),
        (["--ps-worker-timeout", "9"], "--ps-worker-timeout needs --ps-servers"),
        (["--ps-servers", "1", "--mpi"], "--ps-servers contradicts --mpi"),
        (["--ps-servers", "1", "--min-np", "1"], "--ps-servers contradicts --min-np"),
        (["--ps-servers", "-1"], "--ps-servers"),
        (["--ps-servers", "1", "--ps-workers", "slurm"], "--ps-workers"),
    ],
)
def test_contradictions_name_the_flag(words: list[str], named: str) -> None:
    assert named in error(*words)


RING = {"HVDLITE_ALLREDUCE": "ring", "HVDLITE_DEVICE_ALLREDUCE": "flat"}
HIERARCHICAL = {"allreduce": "hierarchical", "device_allreduce": "hierarchical"}


@pytest.mark.parametrize(
    ("words", "file", "variables", "wins"),
    [
        (["--hierarchical-allreduce"], "params: {allreduce: ring}", {}, HIERARCHICAL),
        (["--hierarchical-allreduce"], "", RING, HIERARCHICAL),
        ([], "params: {hierarchical_allreduce: true}", RING, HIERARCHICAL),
        (["--no-hierarchical-allreduce"], "params: {hierarchical_allreduce: true}", RING,
         {"allreduce": "ring", "device_allreduce": "flat"}),
        (["--allreduce", "ring"], "params: {hierarchical_allreduce: true}", {},
         {"allreduce": "ring", "device_allreduce": "hierarchical"}),
        ([], "params: {hierarchical_allreduce: true, allreduce: ring}", {}, {"allreduce": "ring"}),
        (["--stall-check-shutdown-time-seconds", "5"], "stall_check: {enabled: false}", {},
         {"stall_check_disable": False, "stall_shutdown_seconds": 5}),
        (["--stall-check-warning-time-seconds", "5"], "", {"HOROVOD_STALL_CHECK_DISABLE": "1"},
         {"stall_check_disable": False, "stall_warning_seconds": 5}),
        (["--no-stall-check"], "stall_check: {shutdown_time_seconds: 5}", {},
         {"stall_check_disable": True}),
        ([], "stall_check: {enabled: false, shutdown_time_seconds: 5}", {},
         {"stall_check_disable": True}),
    ],
)  # fmt: skip
def test_what_contradicts_a_flag_elsewhere_gives_way(
    tmp_path: Path, words: list[str], file: str, variables: dict[str, str], wins: dict[str, object]
) -> None:
    """A flag wins over the config file, which wins over variables, also where names differ."""
    path = tmp_path / "config.yaml"
    path.write_text(file)
    given = options("-np", "1", "--config-file", str(path), *words, environ=variables)
    config = Config.from_environ({**variables, **given.variables})
    assert {name: getattr(config, name) for name in wins} == wins


def test_garbage_in_a_variable_is_found_before_a_start() -> None:
    text = error("-np", "2", environ={"HOROVOD_CYCLE_TIME": "garbage"})
    assert text.startswith("HOROVOD_CYCLE_TIME='garbage'")


VALUES = {"allreduce": "ring", "data_plane": "mpi", "log_level": "info", "timeline": "t.json",
          "thread_affinity": "0,1,2,3", "segmentation": "size:80,20", "autotune_log": "a",
          "autotune_noise": "0.5", "launcher": "ssh", "transport": "tcp",
          "trace_iterations": "t.csv", "ps_workers": "independent",
          "device_allreduce": "hierarchical"}  # fmt: skip


@pytest.mark.parametrize("entry", [e for e in settings() if e.flag], ids=lambda entry: entry.name)
def test_each_flag_sets_its_variable(entry) -> None:  # type: ignore[no-untyped-def]
    assert entry.flag is not None
    if entry.no_flag:
        environ = {"HVDLITE_TIMELINE": "t.json"}
        assert options("-np", "1", entry.flag, environ=environ).variables == {entry.variable: "1"}
        assert options("-np", "1", entry.no_flag).variables == {entry.variable: "0"}
        return
    text = VALUES.get(entry.name, "7")
    expected = text if entry.flag_scale == 1 else str(7 * entry.flag_scale)
    more = ["--min-np", "1"] if entry.name == "elastic_timeout_seconds" else []
    needed = {"HVDLITE_PS_SERVERS": "1"} if entry.name.startswith("ps_") else {}
    more += ["--ps-servers", "1"] if needed else []
    found = options("-np", "1", *more, entry.flag, text).variables
    assert found == needed | {entry.variable: expected}


CONFIG = """
controller: mpi
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 1.5
  cache_capacity:
timeline:
  filename: t.json
  mark_cycles: true
autotune:
  enabled: true
  log_file: a.csv
  warmup_samples: 1
  steps_per_sample: 5
  bayes_opt_max_samples: 30
  gaussian_process_noise: 0.5
stall_check:
  enabled: false
logging:
  level: DEBUG
  with_timestamp: true
library_options:
  thread_affinity: [0, 1]
"""


def test_the_config_file_has_horovods_keys_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    given = options("-np", "2", "--config-file", str(path), "--cycle-time-ms", "3").variables
    assert given == {
        "HVDLITE_FUSION_THRESHOLD": str(32 << 20),
        "HVDLITE_CYCLE_TIME": "3",
        "HVDLITE_TIMELINE": "t.json",
        "HVDLITE_TIMELINE_MARK_CYCLES": "1",
        "HVDLITE_AUTOTUNE": "1",
        "HVDLITE_AUTOTUNE_LOG": "a.csv",
        "HVDLITE_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HVDLITE_AUTOTUNE_STEPS_PER_SAMPLE": "5",
        "HVDLITE_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "30",
        "HVDLITE_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5",
        "HVDLITE_STALL_CHECK_DISABLE": "1",
        "HVDLITE_LOG_LEVEL": "DEBUG",
        "HVDLITE_LOG_HIDE_TIME": "0",
        "HVDLITE_THREAD_AFFINITY": "0,1",
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "params: {fusion_treshold_mb: 3}",
            "unknown key params.fusion_treshold_mb: did you mean params.fusion_threshold_mb?",
        ),
        ("surprise: 1", "unknown key surprise; the keys are autotune."),
        ("autotune: {bayes: 3}", "unknown key autotune.bayes"),
        ("params: 3", "params='3': params must be a section of keys"),
        ("params: [cycle_time_ms]", "params must be a section of keys"),
        ("[1, 2]", "the whole file"),
        ("params: {cycle_time_ms: often}", "params.cycle_time_ms='often'"),
        ("params: {fusion_threshold_mb: true}", "params.fusion_threshold_mb"),
        ("timeline: {filename: true}", "timeline.filename='true': cannot be true or false"),
        ("stall_check: {enabled: often}", "stall_check.enabled='often': must be 0 or 1"),
        ("a: [", "is not YAML"),
        ("params: {cycle_time_ms: 2}\ntimeline:\nparams: {cache_capacity: 2}",
         "params is there twice, in line 1 and in line 3: leave one out"),
        ("params:\n  cycle_time_ms: 1\n  'cycle_time_ms': 2",
         "cycle_time_ms is there twice, in line 2 and in line 3"),
        ("params: {cycle_time_ms: 1}\nparams.cycle_time_ms: 2",
         "params.cycle_time_ms='2': this key is there twice"),
        (f"params: {{cache_capacity: {'9' * 5000}}}", "must be a whole number"),
        (f"params: {{cache_capacity: {'9' * 400}}}", "must be a whole number of at least 0"),
        ("params: &p {x: *p}", "line 1: this part contains itself"),
        ("params: " + "[" * 3000 + "]" * 3000, "is nested too deeply"),
        ("params", "the whole file is 'params': it must be sections of keys"),
        ("- params", "the whole file is ['params']: it must be sections of keys"),
        ("false", "the whole file is 'false': "),
        ("0", "the whole file is '0': "),
        ("[]", "the whole file is []: "),
        ('""', "the whole file is '': "),
        ("timeline: {filename: [a, b]}", "['a', 'b']: must be one value, and is a list"),
        ("timeline: {filename: {a: b}}", "{'a': 'b'}: must be one value, and is a section of keys"),
        ("timeline: {filename: {}}", "timeline.filename={}: must be one value"),
        ("params: {cycle_time_ms: [1]}", "params.cycle_time_ms=['1']: must be one value"),
        ("trace: {iterations: 7}", "trace.iterations='7': must be a file name that ends with"),
    ],
)  # fmt: skip
def test_a_bad_config_file_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    message = error("--config-file", str(path))
    assert named in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing", None),
        ("null", None),
        ("{}", None),
        ("params:", None),
        ("params: {cycle_time_ms: '2'}", "2"),
        ("params: &all\n  <<: {cycle_time_ms: 3}\n  cycle_time_ms: 2", "2"),
        ("params: &all\n  <<: &two {cycle_time_ms: 2}\nlogging:\n  level: debug", "2"),
        ("\ufeffparams: {cycle_time_ms: 2}", "2"),
    ],
)
def test_a_config_file_may_be_empty_and_repeat_parts(
    tmp_path: Path, text: str, value: str | None
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    given = options("-np", "1", "--config-file", str(path)).variables
    assert given.get("HVDLITE_CYCLE_TIME") == value


@pytest.mark.parametrize(
    ("text", "variable", "value"),
    [
        ("params: {devices: off}", "DEVICES", "off"),
        ("params: {devices: 'off'}", "DEVICES", "off"),
        ("params: {devices: nccl}", "DEVICES", "nccl"),
        ("timeline: {filename: 1.10}", "TIMELINE", "1.10"),
        ("timeline: {filename: 007}", "TIMELINE", "007"),
        ("timeline: {filename: 2026-13-01}", "TIMELINE", "2026-13-01"),
        ("params: {cache_capacity: 010}", "CACHE_CAPACITY", "010"),
        ("timeline: {mark_cycles: yes}", "TIMELINE_MARK_CYCLES", "1"),
        ("timeline: {mark_cycles: 'False'}", "TIMELINE_MARK_CYCLES", "0"),
        ("stall_check: {enabled: off}", "STALL_CHECK_DISABLE", "1"),
    ],
)
def test_values_of_the_config_file_are_the_texts_that_variables_would_have(
    tmp_path: Path, text: str, variable: str, value: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    environ = {"HVDLITE_TIMELINE": "t.json"}
    given = options("-np", "1", "--config-file", str(path), environ=environ).variables
    assert given[f"HVDLITE_{variable}"] == value


def test_keys_of_the_config_file_without_a_meaning_warn(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("controller: gloo\nlibrary_options: {num_nccl_streams: 2}\n"
                    "params: {torus_allreduce: true, cycle_time_ms: 2}\n")  # fmt: skip
    given = options("-np", "1", "--config-file", str(path))
    assert given.variables == {"HVDLITE_CYCLE_TIME": "2"}
    assert [note.partition(" has no meaning here")[0] for note in given.notes] == [
        f"{path}: controller='gloo'",
        f"{path}: library_options.num_nccl_streams='2'",
        f"{path}: params.torus_allreduce='true'",
    ]


def test_ranks_wait_for_one_that_is_debugged_unless_told_otherwise() -> None:
    patient = options("-np", "2", "--debug-rank", "1").variables
    assert patient == {"HVDLITE_STALL_CHECK_DISABLE": "1", "HVDLITE_START_TIMEOUT": "86400"}
    own = options("-np", "2", "--debug-rank", "0", "--stall-check", "--start-timeout", "9")
    assert own.variables == {"HVDLITE_STALL_CHECK_DISABLE": "0", "HVDLITE_START_TIMEOUT": "9"}
    assert own.start_timeout_seconds == 9


def test_help_is_complete() -> None:
    text = make_parser().format_help()
    for entry in settings():
        assert not entry.flag or entry.flag in text
    assert "--disable-cache" not in text


def test_help_has_defaults_which_are_accepted_as_flags() -> None:
    text = " ".join(make_parser().format_help().split())
    for entry in settings():
        if not (entry.flag and entry.has_default):
            continue
        if entry.no_flag:
            assert f"{entry.no_flag} the opposite of {entry.flag}; the default" in text
            assert entry.default is False
            continue
        found = re.search(rf"{entry.flag} VALUE {re.escape(entry.help)} Default: (\S+)\. ", text)
        assert found, entry.flag
        assert entry.parse(entry.variable_text(found[1], entry.flag)) == entry.default


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        ([], "ssh"),
        (["-H", "a:1,b:1"], "ssh"),
        (["--gloo"], "ssh"),
        (["--tcp"], "ssh"),
        (["--mpi"], "mpirun"),
        (["--mpi-args=-x A"], "mpirun"),
        (["--binding-args=--bind-to core"], "mpirun"),
        (["--transport", "mpi"], "mpirun"),
        (["--allreduce", "mpi"], "mpirun"),
        (["--data-plane", "mpi"], "mpirun"),
        (["--launcher", "mpirun"], "mpirun"),
        (["--launcher", "ssh", "--transport", "tcp"], "ssh"),
        (["--launcher", "ssh", "--binding-args=--bind-to core"], "ssh"),
    ],
    ids=" ".join,
)
def test_what_starts_the_ranks(words: list[str], launcher: str) -> None:
    assert options("-np", "1", *words).launcher == launcher


def test_the_variable_of_the_launcher_is_a_choice_too() -> None:
    assert options("-np", "1", environ={"HVDLITE_LAUNCHER": "mpirun"}).launcher == "mpirun"
    both = options("-np", "1", "--launcher=ssh", environ={"HVDLITE_LAUNCHER": "mpirun"})
    assert both.launcher == "ssh"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--launcher", "ssh", "--mpi"], "--mpi contradicts --launcher ssh"),
        (["--launcher", "ssh", "--mpi-args=-x A"], "--mpi-args contradicts --launcher ssh"),
        (["--launcher", "mpirun", "--gloo"], "--gloo contradicts --launcher mpirun"),
        (["--gloo", "--mpi"], "--mpi"),
        (["--launcher", "srun"], "Slurm"),
        (["--launcher", "sbatch"], "--launcher='sbatch'"),
        (["--launcher", "ssh", "--binding-args=--rankfile f"], "--bind-to core"),
    ],
)
def test_contradictions_about_the_launcher(words: list[str], named: str) -> None:
    assert named in error("-np", "1", *words)
