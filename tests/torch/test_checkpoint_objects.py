"""Objects that are no module and no optimizer: a load gives them all that was saved of them.

The oracle is PyTorch's way: `load_state_dict` of a copy of the saved `state_dict`.
"""

from __future__ import annotations

import copy
import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR

import hvdlite.torch as hvd
import hvdlite.torch.checkpoint as forms
from tests.ranks import run_ranks

pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

# DTensors have a group of ranks, without which DCP warns.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FORMS = ("safetensors", "dcp")


@pytest.fixture(params=FORMS)
def save(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Saves as states are that have DTensors, or none."""
    monkeypatch.setattr(forms, "_has_dtensors", lambda tree: request.param == "dcp")
    return lambda state: hvd.checkpoint.save(tmp_path / "it", state)


class Tracker:
    """Holds what it is given, or loads."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def exact(value: Any) -> Any:
    """A form of a state that is equal where types of keys and lengths of lists are, too."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return type(value), {(type(key), key): exact(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [exact(each) for each in value]
    return type(value), value


def ones(*values: float) -> list[torch.Tensor]:
    return [torch.full((2,), value) for value in values]


SAVED: dict[str, Any] = {
    "best": 0.5,
    "history": {"epoch0": 0.7, "epoch1": 0.5},
    "shadow": {"fc1.weight": torch.ones(2), "fc2": {"weight": torch.ones(3), "2.5": torch.ones(1)}},
    "milestones": {3: 1, 6: torch.ones(1), "3b": 2, True: 3, None: 4, 2.5: 5, "6.": 6},
    "texts": {"3": 1, "6": torch.ones(1), "None": 2},
    "places": {"0": torch.ones(1), "1": torch.ones(1)},
    "losses": ones(1, 2),
    "lists": [[], *ones(3), {}, {"a.b": ones(1), 2: [ones(4)]}],
    "numbers": [1.0, 2.0],
    "nothing": {},
    "none of many": {"deep": {"er": {}}, "list": []},
    "a.dotted": {"key.s": 1},
    "counted": Counter({"a": 2, 3: 1}),
}
BEFORE: dict[str, dict[str, Any]] = {
    "empty": {},
    "empty below": {key: type(value)() for key, value in SAVED.items()},
    "other entries": {
        "best": torch.ones(2),
        "history": {"epoch0": 0.1, "epoch7": 0.1},
        "shadow": {"fc1": {"weight": torch.zeros(2)}, "fc2.weight": torch.zeros(3)},
        "milestones": {3: 7, "6": torch.zeros(1)},
        "texts": {3: 5, None: 3},
        "places": ones(0),
        "losses": ones(0, 0, 0),
        "lists": ones(0),
        "numbers": ones(0),
        "nothing": {"full": torch.zeros(1), "of": {"it": 1}},
        "none of many": {"deep": [1], "more": ones(1)},
        "a.dotted": {"key": {"s": 2}},
        "counted": Counter({"b": 2}),
    },
    "as saved": copy.deepcopy(SAVED),
}


@pytest.mark.parametrize("before", BEFORE)
def test_a_tracker_gets_all_that_was_saved(before: str, save: Any, tmp_path: Path) -> None:
    saved, own = copy.deepcopy(SAVED), copy.deepcopy(BEFORE[before])
    save({"tracker": Tracker(**saved), "step": 3})
    state = {"tracker": Tracker(**own), "step": 0}
    assert hvd.checkpoint.load(tmp_path / "it", state)["step"] == 3
    loaded = state["tracker"].held
    for key, value in SAVED.items():
        # What is not there is made as JSON has it, which knows no Counter.
        expected = dict(value) if key == "counted" and before == "empty" else value
        assert exact(loaded[key]) == exact(expected), key
    assert loaded.keys() == SAVED.keys()
    root = Tracker()
    save(Tracker(**saved))
    hvd.checkpoint.load(tmp_path / "it", root)
    assert exact(root.held["shadow"]) == exact(SAVED["shadow"])


def test_tensors_that_are_there_are_loaded_in_place(save: Any, tmp_path: Path) -> None:
    own = torch.zeros(2)
    save({"ema": Tracker(shadow=OrderedDict({"fc.w": torch.ones(2), "fc.b": torch.ones(3)}))})
    state = {"ema": Tracker(shadow=OrderedDict({"fc.w": own}))}
    hvd.checkpoint.load(tmp_path / "it", state)
    shadow = state["ema"].held["shadow"]
    assert isinstance(shadow, OrderedDict) and shadow["fc.w"] is own
    assert own.tolist() == [1, 1] and shadow["fc.b"].tolist() == [1, 1, 1]


def test_milestones_are_those_that_were_saved(save: Any, tmp_path: Path) -> None:
    def scheduler(*milestones: int) -> Any:
        return MultiStepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), milestones)

    def rates(given: Any) -> list[float]:
        found = []
        for _ in range(7):
            given.optimizer.step()
            given.step()
            found += given.get_last_lr()
        return found + given._get_closed_form_lr()

    save({"scheduler": scheduler(3, 6)})
    ours, theirs = scheduler(3), scheduler(3)
    hvd.checkpoint.load(tmp_path / "it", {"scheduler": ours})
    theirs.load_state_dict(scheduler(3, 6).state_dict())
    assert exact(ours.milestones) == exact(theirs.milestones)
    assert rates(ours) == rates(theirs) == rates(scheduler(3, 6))


class Average:
    """The average of a model's weights, which has no shadow before the first update."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}

    def update(self, net: torch.nn.Module) -> None:
        for name, value in net.named_parameters():
            self.shadow[name] = value.detach() / 2

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.5, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def test_a_shadow_of_weights_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    def write(rank: int) -> None:
        average = Average()
        average.update(nets[0])
        hvd.checkpoint.save(tmp_path / "it", {"average": average})

    def read(rank: int) -> Any:
        state = {"average": Average()}
        hvd.checkpoint.load(tmp_path / "it", state)
        return exact(state["average"].shadow)

    nets = [torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))]
    run_ranks(2, write)
    expected = Average()
    expected.update(nets[0])
    assert run_ranks(3, read) == [exact(expected.shadow)] * 3
    assert run_ranks(1, read) == [exact(expected.shadow)]


def test_a_grad_scaler(save: Any, tmp_path: Path) -> None:
    saved = torch.amp.GradScaler("cpu", init_scale=8.0)
    save({"scaler": saved})
    for enabled in (True, False):
        fresh = torch.amp.GradScaler("cpu", enabled=enabled)
        hvd.checkpoint.load(tmp_path / "it", {"scaler": fresh})
        assert fresh.state_dict() == (saved.state_dict() if enabled else {})
    save({"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    with pytest.raises(KeyError, match=r"has no 'scaler\.scale'"):
        hvd.checkpoint.load(tmp_path / "it", {"scaler": torch.amp.GradScaler("cpu")})


def test_a_key_that_the_checkpoint_lacks_is_kept_if_not_strict(save: Any, tmp_path: Path) -> None:
    save({"tracker": Tracker(best=1.0, history={"a": 1})})
    tracker = Tracker(best=0.0, history={"b": 2}, later=ones(5))
    with pytest.raises(KeyError, match=r"has no 'tracker\.later\.0'"):
        hvd.checkpoint.load(tmp_path / "it", {"tracker": tracker})
    with pytest.warns(UserWarning, match=r"'tracker\.later\.0'.*kept"):
        hvd.checkpoint.load(tmp_path / "it", {"tracker": tracker}, strict=False)
    assert exact(tracker.held) == exact({"best": 1.0, "history": {"a": 1}, "later": ones(5)})


def test_modules_and_objects_in_the_state_of_an_object(save: Any, tmp_path: Path) -> None:
    def outer(value: float, **shadow: Any) -> Tracker:
        net = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(net.weight, value)
        inner = Tracker(shadow=shadow)
        return Tracker(nets=[torch.nn.Identity(), net], by={"in.ner": inner}, n={1: ones(value)})

    save({"outer": outer(3.0, **{"a.b": torch.ones(1)})})
    fresh = outer(0.0)
    net, inner = fresh.held["nets"][1], fresh.held["by"]["in.ner"]
    hvd.checkpoint.load(tmp_path / "it", {"outer": fresh})
    assert fresh.held["nets"][1] is net and net.weight.item() == 3
    assert fresh.held["by"]["in.ner"] is inner
    assert exact(inner.held) == exact({"shadow": {"a.b": torch.ones(1)}})
    assert exact(fresh.held["n"]) == exact({1: ones(3.0)})


def test_checkpoints_without_keys_go_by_the_names(tmp_path: Path) -> None:
    """As earlier releases wrote them. Numbers beside numbers are numbers, as milestones are."""
    hvd.checkpoint.save(tmp_path / "it", {"tracker": Tracker(**copy.deepcopy(SAVED))})
    path = tmp_path / "it" / "layout.json"
    content = json.loads(path.read_text())
    assert "tracker.best" not in content["keys"]
    del content["keys"]
    content["values"] = {name: value for name, value in content["values"].items() if value != {}}
    path.write_text(json.dumps(content))
    own = copy.deepcopy(SAVED) | {"milestones": {3: 0, None: 0}, "losses": ones(0)}
    own["shadow"] = {"fc1.weight": torch.zeros(2), "fc2": {}}
    state = {"tracker": Tracker(**own)}
    hvd.checkpoint.load(tmp_path / "it", state)
    loaded = state["tracker"].held
    assert exact(loaded["losses"]) == exact(SAVED["losses"])
    assert exact(loaded["shadow"]["fc1.weight"]) == exact(torch.ones(2))
    assert loaded["milestones"][3] == 1 and loaded["milestones"][None] == 4

    hvd.checkpoint.save(tmp_path / "it", {"tracker": {"milestones": {3: 1, 6: 1}}})
    assert "keys" not in json.loads(path.read_text())
    tracker = Tracker(milestones={3: 0})
    hvd.checkpoint.load(tmp_path / "it", {"tracker": tracker})
    assert exact(tracker.held) == exact({"milestones": {3: 1, 6: 1}})


def test_keys_that_are_damaged(tmp_path: Path) -> None:
    hvd.checkpoint.save(tmp_path / "it", {"tracker": Tracker(history={3: 1})})
    path = tmp_path / "it" / "layout.json"
    content = json.loads(path.read_text())
    for keys in (7, {"tracker.history.3": 7}, {"tracker.history.3": [{}]},
                 {"tracker.history.3": [[]]}, {"tracker.history.3": [["a"]]}):  # fmt: skip
        path.write_text(json.dumps({**content, "keys": keys}))
        with pytest.raises(ValueError, match=r"layout\.json is damaged"):
            hvd.checkpoint.load(tmp_path / "it", {"tracker": Tracker()})


def test_consolidated_checkpoints_keep_the_keys(save: Any, tmp_path: Path) -> None:
    save({"tracker": Tracker(history={3: ones(1), "a.b": {}})})
    hvd.checkpoint.consolidate(tmp_path / "it", tmp_path / "one")
    tracker = Tracker()
    hvd.checkpoint.load(tmp_path / "one", {"tracker": tracker})
    assert exact(tracker.held) == exact({"history": {3: ones(1), "a.b": {}}})


def test_empty_dicts_and_other_entries_of_one_name(save: Any) -> None:
    with pytest.raises(ValueError, match=r"two entries of the state have the name 'it\.a\.b'"):
        save({"it": Tracker(**{"a": {"b": {}}, "a.b": 1})})
