"""`ps.save` and `ps.load`: training goes on with another number of servers, against one process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.numpy import ps
from hvdlite.ps import context
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler.checkpoint_order import LOAD, SAVE, CheckpointOrder
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.clocks import ASYNC, SYNC
from hvdlite.ps.tables.updater import Added
from tests.ps.cluster import (
    SIZES,
    NewCluster,
    Trainer,
    bits,
    gradients_of,
    in_threads,
    train_in_one,
    trainers,
    wait_until,
    with_one,
    with_two,
)
from tests.ps.test_scaling import Adam
from tests.ps.test_tables import Momentum

OF_THREAD = threading.local()
BOTH = (0, 1)


@pytest.fixture(autouse=True)
def workers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "worker", lambda: OF_THREAD.worker)
    monkeypatch.setattr(context, "role", lambda: "worker")
    settings = type("Settings", (), {"independent": True})
    monkeypatch.setattr(context, "current", lambda: type("Context", (), {"settings": settings}))


def save(trainer: Trainer, folder: Path) -> None:
    OF_THREAD.worker = trainer.worker
    ps.save(folder)


def load(trainer: Trainer, folder: Path) -> int:
    OF_THREAD.worker = trainer.worker
    steps = ps.load(folder)
    trainer.table.pull(trainer.values)
    return steps


def to_all(pair: list[Trainer], act: Callable[[Trainer], Any]) -> list[Any]:
    return in_threads(*[partial(act, trainer) for trainer in pair])


@pytest.fixture
def saved(new_cluster: NewCluster, tmp_path: Path) -> Path:
    """Return a checkpoint of two servers and two workers after 5 steps with Adam."""
    cluster = new_cluster(2, 2, updater=Adam, folder="first")
    pair = trainers(cluster, 2)
    to_all(pair, lambda trainer: trainer.train(5))
    save(pair[1], tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(("servers", "updater"), [(3, Adam), (2, Momentum), (1, Adam)])
def test_training_goes_on_with_other_servers(
    new_cluster: NewCluster, tmp_path: Path, servers: int, updater: Any
) -> None:
    folder = tmp_path / "saved"
    pair = trainers(new_cluster(2, 2, updater=updater, folder="first"), 2)
    to_all(pair, lambda trainer: trainer.train(5))
    save(pair[1], folder)
    to_all(pair, lambda trainer: trainer.train(8))  # The save does not disturb it.
    wanted = train_in_one(8, lambda _: BOTH, updater)
    assert [bits(trainer.values) for trainer in pair] == [wanted] * 2

    pair = trainers(new_cluster(servers, 2, updater=updater, folder="second"), 2)
    assert to_all(pair, lambda trainer: load(trainer, folder)) == [5, 5]
    five = train_in_one(5, lambda _: BOTH, updater)
    assert [bits(trainer.values) for trainer in pair] == [five] * 2
    to_all(pair, lambda trainer: trainer.train(2))
    save(pair[0], folder)  # The steps of the first training count on.
    to_all(pair, lambda trainer: trainer.train(3))
    assert [bits(trainer.values) for trainer in pair] == [wanted] * 2
    seven = json.loads((folder / "layout.json").read_text())["values"]["parameter_server"]
    assert seven["tables"]["t"]["steps"] == 7
    assert sorted(path.name for path in folder.iterdir()) == [
        "layout.json",
        *(f"t.{n:05d}-of-{servers:05d}.safetensors" for n in range(servers)),
    ]


@pytest.mark.parametrize("act", [save, load])
def test_a_worker_that_makes_a_step_again_saves_and_loads_after_it(
    new_cluster: NewCluster, tmp_path: Path, saved: Path, act: Callable[[Trainer, Path], Any]
) -> None:
    """One of two servers has its push of that step: their versions differ until it has made it."""
    cluster, first, second = with_two(new_cluster, 2, updater=Adam, folder="second")
    to_all([first, second], lambda trainer: load(trainer, saved))
    to_all([first, second], lambda trainer: trainer.train(3))
    first.push()
    (shard, _), ended = second.table._shards, threading.Event()
    payloads = second.table._cut(gradients_of(3 + 5, 1), 0)
    second.worker._client.call(lambda: shard.push({}, payloads, lambda _: ended.set()))
    assert ended.wait(20)
    second.worker.close()
    again = Trainer(cluster.worker("worker 1", 1))
    load(again, saved)  # It comes when others have made steps, and loads nothing.
    folder = tmp_path / "again" if act is save else saved
    with pytest.raises(ValueError, match=r"server 0: the table 't' has 4 steps, .* finished 3"):
        act(again, folder)
    assert act is load or not folder.exists()
    to_all([first, again], lambda trainer: trainer.train(4))
    act(again, folder)


def test_all_workers_may_save_one_after_another(
    new_cluster: NewCluster, tmp_path: Path, saved: Path
) -> None:
    pair = trainers(new_cluster(1, 2, updater=Adam, folder="second"), 2)
    to_all(pair, lambda trainer: load(trainer, saved))
    for step in (1, 2):
        to_all(pair, lambda trainer, step=step: trainer.train(step))  # type: ignore[misc]
        to_all(pair, lambda trainer: save(trainer, saved))
    again = trainers(new_cluster(2, 2, updater=Adam, folder="third"), 2)
    assert to_all(again, lambda trainer: load(trainer, saved)) == [7, 7]
    assert bits(again[0].values) == train_in_one(7, lambda _: BOTH, Adam)


def test_a_worker_that_loads_later_undoes_no_steps(new_cluster: NewCluster, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    first, second = trainers(new_cluster(2, 2, folder="first"), 2, ASYNC)
    save(first, folder)
    load(first, folder)
    first.push_ones()
    first.table.pull(first.values)
    load(second, folder)
    assert bits(second.values) == bits(first.values)
    begin = bits(np.arange(size, dtype=float) for size in SIZES)  # type: ignore[arg-type]
    assert bits(first.values) != begin
    load(second, folder)  # Its second load is the second one of the job.
    assert bits(second.values) == begin


def test_a_worker_that_returns_loads_nothing(new_cluster: NewCluster, tmp_path: Path) -> None:
    """A script loads where there is a checkpoint: at its first start there was none."""
    folder = tmp_path / "saved"
    cluster, trainer = with_one(new_cluster, 2)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load(trainer, folder)
    trainer.train(3)
    save(trainer, folder)
    trainer.train(6)
    trainer.worker.close()
    returned = Trainer(cluster.worker("worker 0", 0))
    assert load(returned, folder) == 0 and returned.table.clock == 6
    returned.train(8)
    assert bits(returned.values) == train_in_one(8, lambda _: [0])


def test_a_server_that_is_lost_later_has_what_was_loaded(
    new_cluster: NewCluster, saved: Path
) -> None:
    cluster = new_cluster(2, 2, updater=Adam, folder="second", every=1)
    pair = trainers(cluster, 2)
    to_all(pair, lambda trainer: load(trainer, saved))
    cluster.restart_server(1)
    to_all(pair, lambda trainer: trainer.train(3))
    assert bits(pair[0].values) == train_in_one(8, lambda _: BOTH, Adam)


def test_a_server_is_killed_while_tables_are_saved(new_cluster: NewCluster, tmp_path: Path) -> None:
    cluster, trainer = with_one(new_cluster, 2, 4, updater=Adam, every=1)
    cluster.servers[1].end()

    def come_again() -> None:
        wait_until((tmp_path / ".saved.new").is_dir)  # Server 0 has begun.
        cluster.servers[1] = cluster.start_server(1)

    in_threads(lambda: save(trainer, tmp_path / "saved"), come_again)
    (again,) = trainers(new_cluster(1, 1, updater=Adam, folder="second"), 1)
    assert load(again, tmp_path / "saved") == 4
    assert bits(again.values) == train_in_one(4, lambda _: [0], Adam)


def test_tables_are_loaded_while_servers_come(new_cluster: NewCluster, saved: Path) -> None:
    cluster = new_cluster(1, 2, updater=Adam, folder="second")
    pair = trainers(cluster, 2)
    cluster.servers.append(cluster.start_server(1, joins=True))
    to_all(pair, lambda trainer: load(trainer, saved))
    wait_until(lambda: cluster.state.registry.layout.num_servers == 2)
    to_all(pair, lambda trainer: trainer.train(4))
    assert bits(pair[1].values) == train_in_one(9, lambda _: BOTH, Adam)


def damage(folder: Path) -> None:
    path = folder / "t.00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def remove_values(folder: Path) -> None:
    path = folder / "layout.json"
    content = json.loads(path.read_text())
    content["values"] = {}
    path.write_text(json.dumps(content))


def give_another_form(folder: Path) -> None:
    path = folder / "layout.json"
    content = json.loads(path.read_text())
    del content["values"]["parameter_server"]["form"]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("harm", "error", "words"),
    [
        (give_another_form, ValueError, "by a ps.save of another form: load it by the release"),
        (
            lambda folder: (folder / "t.00001-of-00002.safetensors").unlink(),
            FileNotFoundError,
            "00001-of-00002.safetensors is not there, which has a part of 't'",
        ),
        (damage, ValueError, "server 1: .*00001-of-00002.* is damaged"),
        (remove_values, ValueError, "was not saved by ps.save"),
        (lambda folder: (folder / "layout.json").unlink(), FileNotFoundError, "no checkpoint"),
    ],
)
def test_what_cannot_be_read_changes_nothing(
    new_cluster: NewCluster, saved: Path, harm: Any, error: type[Exception], words: str
) -> None:
    harm(saved)
    (trainer,) = trainers(new_cluster(2, 1, updater=Adam, folder="second"), 1)
    with pytest.raises(error, match=words):
        load(trainer, saved)
    trainer.train(4)
    assert bits(trainer.values) == train_in_one(4, lambda _: [0], Adam)


def test_another_model_is_refused(new_cluster: NewCluster, saved: Path) -> None:
    worker = new_cluster(1, 1, updater=Adam, folder="second").worker("worker 0")
    OF_THREAD.worker = worker
    with pytest.raises(ValueError, match="nothing can be loaded yet: make the Distributed"):
        ps.load(saved)
    ps.start("counts", np.zeros(3))
    with pytest.raises(KeyError, match=r"no table 'raw.counts', but t"):
        ps.load(saved)
    worker.named.clear()
    specs = [TensorSpec(str(n), "float64", (size,)) for n, size in enumerate((300, 8, 40))]
    worker.declare(
        "t", specs, TableOptions(SYNC, None, part_bytes=800),
        lambda: [np.zeros(spec.size) for spec in specs],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"tensor '1': its shape is \(8,\) here, and \(7,\)"):
        ps.load(saved)


def test_a_folder_with_other_files_is_not_replaced(new_cluster: NewCluster, tmp_path: Path) -> None:
    (trainer,) = trainers(new_cluster(2, 1, folder="first"), 1)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"server 0: .*thesis exists and is no checkpoint"):
        save(trainer, tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").exists()
    trainer.train(2)
    save(trainer, tmp_path / "saved")


def test_raw_tensors_and_rows_are_saved(new_cluster: NewCluster, tmp_path: Path) -> None:
    OF_THREAD.worker = new_cluster(2, 1, updater=Added, folder="first").worker("worker 0")
    ps.push("counts", np.arange(5.0))
    ps.start_rows("rows", 30, 4, "float64", seed=3)
    ids = np.array([3, 28, 7, 12])
    ps.push_rows("rows", ids, np.ones((4, 4)))
    wanted = ps.pull_rows("rows", np.arange(30))
    ps.save(tmp_path / "saved")
    for servers in (3, 1):
        cluster = new_cluster(servers, 1, updater=Added, folder=f"with {servers}")
        OF_THREAD.worker = cluster.worker("worker 0")
        ps.start("counts", np.zeros(5))
        ps.start_rows("rows", 30, 4, "float64", seed=3)
        ps.push_rows("rows", ids, np.full((4, 4), 9.0))  # It does not survive the load.
        ps.load(tmp_path / "saved")
        assert (ps.pull("counts") == np.arange(5.0)).all()
        assert (ps.pull_rows("rows", np.arange(30)) == wanted).all()
        ps.push("counts", np.ones(5))
        assert (ps.pull("counts") == np.arange(5.0) + 1).all()
    OF_THREAD.worker = new_cluster(1, 1, folder="other").worker("worker 0")
    ps.start("counts", np.zeros(5))
    ps.start_rows("rows", 30, 4, "float64", seed=4)
    with pytest.raises(ValueError, match=r"table 'raw.rows' has rows .* here"):
        ps.load(tmp_path / "saved")


def test_the_number_of_servers_is_lowered(new_cluster: NewCluster) -> None:
    cluster, trainer = with_one(new_cluster, 2, 2)
    OF_THREAD.worker = trainer.worker
    ps.scale_servers(1)
    wait_until(lambda: cluster.state.registry.layout.num_servers == 1)
    trainer.train(4)
    assert bits(trainer.values) == train_in_one(4, lambda _: [0])
    with pytest.raises(HorovodInternalError, match="2 servers cannot be left of 1"):
        ps.scale_servers(2)


# -- optimizers of PyTorch


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(("servers", "kind"), [(3, "adam"), (3, "norms"), (1, "adam"), (1, "sgd")])
def test_optimizers_of_torch_go_on(
    new_cluster: NewCluster, tmp_path: Path, servers: int, kind: str
) -> None:
    from tests.ps import torch_checkpoints as of_torch

    of_torch.check(new_cluster, tmp_path / "saved", servers, kind, OF_THREAD)


@pytest.mark.usefixtures("one_torch_thread")
def test_rows_of_torch_go_on(new_cluster: NewCluster, tmp_path: Path) -> None:
    from tests.ps import torch_checkpoints as of_torch

    of_torch.check_rows(new_cluster, tmp_path / "saved", OF_THREAD)


# -- whose turn it is


PEERS = (b"0", b"1")


def test_turns_are_given_one_after_another() -> None:
    turns, save = CheckpointOrder(), {"what": SAVE}

    def answers(now: int, peers: Sequence[bytes] = PEERS) -> list[tuple[bytes, int, int]]:
        found = turns.go_on(peers, [0, 1], now)
        return [(to, answer.request, answer.body["turn"]) for to, answer in found]

    turns.ask(b"0", 7, save)
    assert answers(100) == [(b"0", 7, 100)] and answers(101) == []
    turns.ask(b"0", 7, save)
    assert answers(101) == [(b"0", 7, 100)]  # It was sent again.
    turns.ask(b"1", 3, save)
    assert answers(102) == []
    turns.end(99, None)  # One of before.
    assert answers(103) == []
    turns.end(100, None)
    assert answers(90) == [(b"1", 3, 101)]  # Unasked. It rises, whatever the clock does.
    turns.ask(b"0", 8, save)
    assert answers(200, [b"0", b"1 that has come again"]) == [(b"0", 8, 200)]
    turns.ask(b"1", 9, save)
    assert answers(201, [b"0"]) == []
    turns.end(200, None)
    assert answers(202) == []  # It was lost meanwhile.


def test_a_load_is_made_once_for_all() -> None:
    turns, load = CheckpointOrder(), {"what": LOAD, "number": 1, "late": False}
    peers = (*PEERS, b"2")
    turns.ask(b"0", 1, load)
    assert not turns.go_on(peers, [0, 1], 10) and turns.load == 10
    for worker in (0, 1):
        turns.report(9, worker, {"t": 3})  # Of another one.
        assert not turns.go_on(peers, [0, 1], 11)
        turns.report(10, worker, {"t": worker})
    assert not turns.go_on(peers, [0, 1, 2], 12)
    ((_, answer),) = turns.go_on(peers, [0, 1], 12)
    assert answer.body["clocks"] == [(0, {"t": 0}), (1, {"t": 1})]
    kept = CheckpointOrder.again(*turns.state())
    assert not kept.go_on([b""], [0, 1], 13) and kept.load == 10  # It is under way.
    kept.ask(b"0", 1, load)
    assert not kept.go_on([b""], [0, 1], 20) and kept.load == 20  # It did not hear it.
    assert turns.end(9, {"steps": {"t": 9}})  # Another one: it is over, and counts nowhere.
    assert not turns.end(10, {"steps": {"t": 5}, "clocks": {"t": []}})
    assert turns.decided is not None
    assert not turns.end(10, None)  # Now it counts, whatever becomes of who leads it.
    for each in (turns, CheckpointOrder.again(*turns.state())):
        each.ask(b"1", 1, load)
        each.ask(b"2", 1, {**load, "number": 9, "late": True})
        assert not each.go_on(peers[1:], [0, 1], 14)
        assert each.load == 10
        each.look([10, 9])
        assert each.load == 10
        each.look([10, 10])
        assert each.loaded == {"t": 10}
        assert not each.load and each.decided is None and each.end(10, None)
        wanted = {"turn": 0, "loads": 1, "steps": {"t": 5}}
        told = each.go_on(peers, [0, 1], 15)
        assert [(to, answer.body) for to, answer in told] == [(b"1", wanted), (b"2", wanted)]
    again = CheckpointOrder(turns.loads, turns.steps)  # Of a scheduler that comes again.
    again.ask(b"1", 1, load)
    assert [each.body for _, each in again.go_on(peers, [0, 1], 13)] == [wanted]
    assert again.end(10, {"steps": {"t": 6}})  # It has forgotten it: the load is made anew.
    assert again.decided is None and again.loads == 1
