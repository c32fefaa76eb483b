"""Settings: what each variable accepts, which of two names wins, and what garbage gets."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from itertools import product

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.settings import logs
from hvdlite.common.settings.config import Config, settings
from hvdlite.common.settings.setting import MIB, Setting, name_list

ALL = list(settings())
# A text setting takes any text; everything else refuses these.
GARBAGE = ["garbage", "1x", "--", "nan", "1e999x", "0x10", "²", "1;2"]
STRICT = [entry for entry in ALL if entry.parse not in (str, name_list)]
# One accepted text for each setting, and what it means.
ACCEPTED = {
    "fusion_threshold_bytes": ("1024", 1024),
    "cycle_time_ms": ("2.5", 2.5),
    "cache_capacity": ("0", 0),
    "allreduce": ("Ring", "ring"),
    "network_model": ("/tmp/m.json", "/tmp/m.json"),
    "result_memory_bytes": ("0", 0),
    "data_plane": ("MPI", "mpi"),
    "hierarchical_allreduce": ("1", True),
    "disable_group_fusion": ("true", True),
    "timeline": ("/tmp/t.json", "/tmp/t.json"),
    "timeline_mark_cycles": ("yes", True),
    "timeline_all_ranks": ("on", True),
    "autotune": ("1", True),
    "autotune_log": ("/tmp/a.csv", "/tmp/a.csv"),
    "autotune_warmup_samples": ("0", 0),
    "autotune_steps_per_sample": ("5", 5),
    "autotune_max_samples": ("30", 30),
    "autotune_noise": ("0.5", 0.5),
    "trace_iterations": ("/tmp/t.csv", "/tmp/t.csv"),
    "live": ("1", True),
    "check_weights": ("100", 100),
    "stall_check_disable": ("2", True),
    "stall_warning_seconds": ("0.5", 0.5),
    "stall_shutdown_seconds": ("90", 90.0),
    "start_timeout_seconds": ("45", 45.0),
    "launcher": ("SSH", "ssh"),
    "transport": ("tcp", "tcp"),
    "network_interfaces": ("eth0, 10.1.0.0/16", ("eth0", "10.1.0.0/16")),
    "tcp_ports": ("12000-12100", (12000, 12100)),
    "tcp_streams": ("4", 4),
    "peer_timeout_seconds": ("2.5", 2.5),
    "elastic_timeout_seconds": ("2.5", 2.5),
    "elastic_host_timeout_seconds": ("0.5", 0.5),
    "elastic_worker_timeout_seconds": ("4", 4.0),
    "elastic_check": ("1", True),
    "ps_servers": ("2", 2),
    "ps_workers": ("Independent", "independent"),
    "ps_snapshot": ("saved", "saved"),
    "ps_snapshot_every": ("20", 20),
    "ps_restarts": ("0", 0),
    "ps_timeout_seconds": ("9.5", 9.5),
    "ps_worker_timeout_seconds": ("9.5", 9.5),
    "mpi_threads_disable": ("1", True),
    "devices": ("gloo", "gloo"),
    "gpus_per_rank": ("2", 2),
    "device_completion": ("HOST", "host"),
    "device_allreduce": ("HIERARCHICAL", "hierarchical"),
    "nccl_library": ("/nccl.so", "/nccl.so"),
    "cudart_library": ("/cudart.so", "/cudart.so"),
    "native": ("off", "off"),
    "segmentation": ("size:80,20", "size:80,20"),
    "tf_native": ("off", "off"),
    "thread_affinity": ("0,2, 1", (0, 2, 1)),
    "log_level": ("DEBUG", "debug"),
    "log_hide_time": ("1", True),
}


def name_of(entry: Setting) -> str:
    return entry.name


def test_nothing_set_gives_the_defaults() -> None:
    assert Config.from_environ({}) == Config()
    assert Config.from_environ({name: "" for e in ALL for name in e.variables}) == Config()


@pytest.mark.parametrize("entry", ALL, ids=name_of)
def test_each_name_of_a_setting_sets_it(entry: Setting) -> None:
    text, value = ACCEPTED[entry.name]
    for variable in entry.variables:
        assert getattr(Config.from_environ({variable: text}), entry.name) == value


@pytest.mark.parametrize("entry", STRICT, ids=name_of)
def test_garbage_is_an_error_that_names_the_variable(entry: Setting) -> None:
    for variable, garbage in product(entry.variables, GARBAGE):
        with pytest.raises(ConfigError) as caught:
            Config.from_environ({variable: garbage})
        assert str(caught.value).startswith(f"{variable}={garbage!r}: must be ")


@pytest.mark.parametrize(
    "variable", ["FUSION_THRESHOLD", "CYCLE_TIME", "CACHE_CAPACITY", "STALL_CHECK_TIME_SECONDS"]
)
def test_a_negative_or_infinite_number_is_refused(variable: str) -> None:
    for text in ("-1", "-inf", "inf", "9" * 400):
        with pytest.raises(ConfigError, match=f"HVDLITE_{variable}"):
            Config.from_environ({"HVDLITE_" + variable: text})


@pytest.mark.parametrize("text", [",", "-1", "0,-2", "a,b", "0.5"])
def test_a_list_of_cores_has_at_least_one_and_only_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="HVDLITE_THREAD_AFFINITY"):
        Config.from_environ({"HVDLITE_THREAD_AFFINITY": text})


@pytest.mark.parametrize(
    ("variable", "text"),
    [("TCP_PORTS", t) for t in ("0", "70000", "12100-12000", "-5", "1-", "a-b")]
    + [("NETWORK_INTERFACES", ","), ("TCP_STREAMS", "0"), ("TCP_STREAMS", "17")],
)
def test_what_the_network_cannot_be(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"HVDLITE_{variable}='{text}'"):
        Config.from_environ({f"HVDLITE_{variable}": text})


def test_one_port_is_a_range() -> None:
    assert Config.from_environ({"HVDLITE_TCP_PORTS": "5000"}).tcp_ports == (5000, 5000)


def test_the_alias_is_not_even_read_where_our_own_name_is_set() -> None:
    for alias in ("1", "garbage"):
        both = {"HOROVOD_CACHE_CAPACITY": alias, "HVDLITE_CACHE_CAPACITY": "2"}
        assert Config.from_environ(both).cache_capacity == 2


def test_names_of_our_own_have_no_alias() -> None:
    assert Config.from_environ({"HOROVOD_ALLREDUCE": "garbage"}).allreduce == "auto"


def test_horovods_switch_for_the_hierarchy_gives_way_to_a_choice() -> None:
    switch = {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}
    assert Config.from_environ(switch).allreduce == "hierarchical"
    assert Config.from_environ({**switch, "HVDLITE_ALLREDUCE": "ring"}).allreduce == "ring"


def test_a_flag_in_megabytes_becomes_bytes() -> None:
    entry = next(entry for entry in ALL if entry.name == "fusion_threshold_bytes")
    assert entry.variable_text("0.5", "--flag") == str(MIB // 2)
    for garbage in ("x", "inf", "nan", "-1"):
        with pytest.raises(ConfigError, match=f"--flag='{garbage}': must be "):
            entry.variable_text(garbage, "--flag")


def test_no_two_settings_share_a_name() -> None:
    for attribute in ("variable", "flag", "no_flag", "yaml"):
        names = [getattr(entry, attribute) for entry in ALL if getattr(entry, attribute)]
        assert len(names) == len(set(names))


def test_what_was_given_is_known() -> None:
    environ = {"HOROVOD_CYCLE_TIME": "1", "HVDLITE_HIERARCHICAL_ALLREDUCE": "0"}
    assert Config.from_environ(environ).given == {"cycle_time_ms", "hierarchical_allreduce"}
    assert not Config().given


def test_noise_is_a_share() -> None:
    with pytest.raises(ConfigError, match="at least 0 and at most 1"):
        Config.from_environ({"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "1.5"})


@pytest.fixture
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """hvdlite's logger, as before the first init."""
    log = logging.getLogger("hvdlite")
    before = log.level, log.propagate, log.handlers
    monkeypatch.setattr("hvdlite.common.settings.logs._Form.level", logging.NOTSET)
    log.handlers = []
    log.setLevel(logging.NOTSET)
    yield log
    log.propagate, log.handlers = before[1:]
    log.setLevel(before[0])


def set_up_log(**variables: str) -> None:
    logs.set_up_log(Config.from_environ({f"HVDLITE_{k}": text for k, text in variables.items()}))


def test_the_log_leaves_what_the_script_has_set(fresh_log: logging.Logger) -> None:
    lines, plain = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(logging.Formatter("JSON %(message)s"))
    fresh_log.handlers = [handler, logging.StreamHandler(plain)]
    fresh_log.setLevel(logging.DEBUG)
    set_up_log(LOG_HIDE_TIME="1")
    fresh_log.debug("x")
    assert (lines.getvalue(), plain.getvalue()) == ("JSON x\n", "hvdlite DEBUG: x\n")
    set_up_log(LOG_LEVEL="error")
    assert fresh_log.level == logging.ERROR


def test_the_log_follows_the_settings_of_each_init(
    fresh_log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    for level, hides, said in (("debug", "1", True), ("", "1", False), ("info", "0", True)):
        set_up_log(LOG_LEVEL=level, LOG_HIDE_TIME=hides)
        fresh_log.info("x")
        line = capsys.readouterr().err
        assert bool(line) == said
        assert not line or (line == "hvdlite INFO: x\n") == (hides == "1")
