"""Plans of sharded operators, without any rank: nothing is sent, and no value is read."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.layouts.layout import Layout, to_placements
from hvdlite.torch import sharding
from hvdlite.torch.sharding.dtensor import Replicate, Shard


class Mesh:
    """As much of a mesh as a plan looks at."""

    shape = (2, 2, 2)

    def size(self) -> int:
        return 8


def block() -> Any:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
    ).to("meta")


def test_the_block_of_mindspore() -> None:
    model = block()
    sharding.set_strategy(model[0], ((2, 1), (1, 4)))
    found = sharding.plan(model, torch.empty(64, 64), mesh=Mesh())
    strategies = {name: each.strategy for name, each in found.items()}
    assert strategies == {
        "0": ((2, 1), (1, 4)),
        "0.add": ((2, 4), (4,)),
        "1": ((2, 4),),
        "2": ((2, 4), (4, 1)),
        "2.add": ((2, 4), (4,)),
        "0.weight": ((4, 1),),  # [out, in], as PyTorch holds it
        "0.bias": ((4,),),
        "2.weight": ((1, 4),),
        "2.bias": ((4,),),
    }
    assert found["2"].bytes == found.bytes == 12288
    assert "12288" in str(found)
    assert str(found.layouts["0.weight"]) == "layout D=[2, 1, 4], M=[0, -1]"


def test_layouts_for_inference_are_those_of_the_plan() -> None:
    layouts = hvd.checkpoint.infer_layout(
        block(), torch.empty(64, 64), strategies={"0": ((2, 1), (1, 4))}, mesh=Mesh()
    )
    assert [layouts[name].box((64, 64), 1) for name in ("0.weight", "2.weight")] == [
        ((16, 32), (0, 64)),
        ((0, 64), (16, 32)),
    ]
    assert layouts["0.bias"].box((64,), 1) == ((16, 32),)


def test_layouts_have_the_names_of_the_state() -> None:
    """A checkpoint has tied tensors under each of their names, and no non-persistent buffer."""
    model = block()
    model[2].weight = model[0].weight
    model[1].register_buffer("scratch", torch.empty(3, device="meta"), persistent=False)
    model[1].register_buffer("kept", torch.empty(3, device="meta"))
    model[2].register_buffer("kept", model[1].kept)
    data, columns = torch.empty(64, 64), {"0": ((2, 1), (1, 4))}
    layouts = hvd.checkpoint.infer_layout(model, data, strategies=columns, mesh=Mesh())
    assert set(layouts) == set(model.state_dict())
    assert layouts["2.weight"] == layouts["0.weight"]
    assert layouts["0.weight"].cuts == (4, 1)
    found = hvd.checkpoint.infer_predict_layout(model, data, strategies=columns, mesh=Mesh())
    assert found["2.weight"][2] == found["0.weight"][2] == [16, 64]


class Product(torch.nn.Module):
    """A product with a weight that is held as [out, in], before which it is turned."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.empty(16, 8, device="meta"))

    def forward(self, x: Any) -> Any:
        return torch.relu(x @ self.w.t())


def test_without_strategies_the_batch_is_cut() -> None:
    found = sharding.plan(Product(), torch.empty(32, 8), mesh=Mesh())
    strategies = {name: each.strategy for name, each in found.items()}
    assert strategies == {
        "t": ((1, 1),), "matmul": ((8, 1), (1, 1)), "relu": ((8, 1),), "w": ((1, 1),),
    }  # fmt: skip
    assert found.bytes == 0
    product = type("Function", (torch.nn.Module,), {"forward": lambda self, x, w: x @ w.t()})()
    found = sharding.plan(product, (torch.empty(32, 8), torch.empty(16, 8)), mesh=Mesh())
    assert found["matmul"].strategy == ((8, 1), (1, 1)), "the first input has the samples"
    # Behind an operator that is whole, all strategies cost the same.
    words = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.Linear(8, 8)).to("meta")
    found = sharding.plan(words, torch.empty(32, dtype=torch.long), mesh=Mesh())
    assert found["1"].strategy == ((8, 1), (1, 1))
    # A weight that is used cut is held cut, too.
    by_columns = {"matmul": ((1, 1), (1, 8))}
    found = sharding.plan(Product(), torch.empty(32, 8), by_columns, Mesh())
    assert found["w"].strategy == ((8, 1),)
    assert found.bytes == 0


def test_operators_of_other_kinds() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)
            self.w = torch.nn.Parameter(torch.zeros(8, 8))
            self.conv = torch.nn.Conv1d(4, 4, 1)

        def forward(self, x: Any, scale: float) -> Any:
            y = torch.softmax(self.norm(x) @ self.w.t() * scale, -1)
            return torch.renorm(self.conv(y.reshape(8, 4, 8)), 2, 0, 1.0), y + x

    found = sharding.plan(Net(), (torch.empty(32, 8), 2.0), {"norm": ((8, 1), (1,), (1,))}, Mesh())
    names = list(found)
    assert {"norm", "t", "matmul", "mul", "softmax", "conv", "add"} <= set(names)
    assert found["softmax"].strategy == ((8, 1),)
    assert found["conv"].strategy == ((8, 1, 1), (1, 1, 1))
    assert found["renorm"].strategy == ((1, 1, 1),), "it runs on whole inputs"
    assert found["renorm"].bytes == 32 * 8 * 4 * 7 // 8


def test_refused_plans() -> None:
    with pytest.raises(ValueError, match="'fc9', which is no operator; there are 0"):
        sharding.plan(block(), torch.empty(64, 64), {"fc9": ((1, 1), (1, 1))}, Mesh())
    with pytest.raises(TypeError, match="a tuple of tuples"):
        sharding.set_strategy(torch.nn.ReLU(), [(1, 2)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not divide"):
        sharding.plan(block(), torch.empty(20, 64), {"0": ((8, 1), (1, 1))}, Mesh())
    with pytest.raises(ValueError, match="'exhaustive' is unknown: use one of"):
        sharding.shard(block(), search="exhaustive")
    with pytest.raises(ValueError, match="memory_limit needs search="):
        sharding.plan(block(), torch.empty(64, 64), mesh=Mesh(), memory_limit=1)
    with pytest.raises(ValueError, match="optimizer_states needs search="):
        sharding.plan(block(), torch.empty(64, 64), mesh=Mesh(), optimizer_states=2)
    held = 4 * (2 * 64 * 64 + 2 * 64) * 4 // 8
    for states, words in ((None, "of parameters,"), (2, "of parameters, gradients and optimizer")):
        least = held if states else held // 4
        with pytest.raises(ValueError, match=f"at least {least} bytes {words}"):
            sharding.plan(
                block(), torch.empty(64, 64), mesh=Mesh(), search="dynamic_programming",
                memory_limit=1, optimizer_states=states,
            )  # fmt: skip
    with pytest.warns(UserWarning, match="no effect"):
        sharding.shard(torch.relu, ((1, 1),), device="Ascend", level=0)
    with pytest.raises(ValueError, match="needs example="):
        sharding.shard(block())


def test_a_strategy_of_the_very_module_is_that_of_its_first_operator() -> None:
    linear = torch.nn.Linear(64, 64, device="meta")
    sharding.set_strategy(linear, ((2, 1), (1, 4)))
    found = sharding.plan(linear, torch.empty(64, 64), mesh=Mesh())
    assert found["linear"].strategy == ((2, 1), (1, 4))
    assert found["linear.add"].strategy == ((2, 4), (4,))
    assert found["weight"].strategy == ((4, 1),)
    other = sharding.plan(linear, torch.empty(64, 64), {"linear": ((8, 1), (1, 1))}, Mesh())
    assert other["linear"].strategy == ((8, 1), (1, 1)), "a strategy of the call goes before"
    model = sharding.set_strategy(block(), ((2, 1), (1, 4)))
    with pytest.raises(ValueError, match="Sequential has no operator of its own"):
        sharding.plan(model, torch.empty(64, 64), mesh=Mesh())


def test_a_sharded_module_is_planned_as_it_was_before() -> None:
    relu = sharding.shard(torch.nn.ReLU(), mesh=Mesh())
    forward = relu.forward
    assert sharding.plan(relu, torch.empty(16, 8), mesh=Mesh())["relu"].strategy == ((8, 1),)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, device="meta"), relu)
    assert sharding.plan(model, torch.empty(16, 8), mesh=Mesh())["1"].strategy == ((8, 1),)
    assert relu.forward == forward, "it is sharded still"
    for again, words in ((relu, "ReLU is sharded already"), (model, "1 is sharded already")):
        with pytest.raises(ValueError, match=words):
            sharding.shard(again, example=torch.empty(16, 8), mesh=Mesh())


def test_models_of_keras_are_refused() -> None:
    """A stand-in: Keras takes seconds to import, and its layers are modules with one backend."""
    layer = type("Dense", (torch.nn.Module,), {"__module__": "keras.src.layers.core.dense"})
    own = type("Mine", (layer,), {"__module__": "train"})()
    call = type("Model", (), {"__module__": "keras.src.models.model", "__call__": print})()
    inside = torch.nn.Sequential(torch.nn.ReLU(), own)
    for model, name in ((own, "Mine"), (call, "Model"), (inside, "1")):
        with pytest.raises(ValueError, match=f"^{name} is of Keras.*shards nothing"):
            sharding.shard(model, mesh=Mesh())
        with pytest.raises(ValueError, match="is of Keras"):
            sharding.plan(model, torch.empty(8, 8), mesh=Mesh())


def test_placements_on_a_mesh() -> None:
    mesh = Mesh()
    r, rows, columns = Replicate(), Shard(0), Shard(1)
    assert sharding.placements((2, 4), mesh) == [rows, columns, columns]
    assert sharding.placements((4,), mesh) == [rows, rows, r]
    assert sharding.placements((1, 8), mesh) == [columns] * 3
    assert sharding.placements(sharding.layout([2, 4], [-1, 0]), mesh) == [r, columns, columns]
    mesh.shape = (4, 2)
    with pytest.raises(ValueError, match="no neighbouring axes that make 2 parts"):
        sharding.placements((2, 4), mesh)


MATRICES = [[8], [2, 4], [4, 2], [2, 2, 2]]


@pytest.mark.parametrize("matrix", MATRICES, ids=str)
def test_dtensor_cuts_as_layouts_do(matrix: list[int]) -> None:
    """All maps of a matrix, also along several axes; the oracle are DTensor's own placements."""
    tensor = torch.arange(256).reshape(16, 16)
    maps = itertools.product([-1, *range(len(matrix))], repeat=2)
    in_order = [(high, low) for high in range(len(matrix)) for low in range(high)]
    found = [Layout(matrix, each) for each in maps if each[0] != each[1] or each[0] == -1]
    found += [Layout(matrix, [pair, -1]) for pair in in_order]
    for layout in found:
        placements = [
            Replicate() if dimension is None else Shard(dimension)
            for dimension in to_placements(layout)
        ]
        for rank in range(8):
            part = tensor
            coordinate = np.unravel_index(rank, matrix)
            for axis, placement in enumerate(placements):
                if isinstance(placement, Shard):
                    parts, _ = placement._split_tensor(part, matrix[axis], with_padding=False)
                    part = parts[int(coordinate[axis])]
            box = layout.box(tensor.shape, rank)
            assert torch.equal(part, tensor[tuple(slice(*each) for each in box)]), (layout, rank)


def test_what_other_strategies_would_cost() -> None:
    """As much as a plan with that strategy, and with those of all other operators."""
    model = block()
    found = sharding.plan(model, torch.empty(64, 64), {"0": ((2, 1), (1, 4))}, Mesh())
    assert found.found is not None
    given = {each.name: found[each.name].strategy for each in found.found.operators}
    for name, used in given.items():
        own, *others = found.alternatives(name).items()
        assert own[0] == used and len(others) > 2
        assert [cost for _, cost in others] == sorted(cost for _, cost in others)
        for strategy, cost in others:
            with_it = sharding.plan(model, torch.empty(64, 64), {**given, name: strategy}, Mesh())
            assert with_it.bytes - found.bytes == cost - own[1], (name, strategy)
    with pytest.raises(KeyError, match=r"'0\.weight' is no operator"):
        found.alternatives("0.weight")


def test_a_printed_plan() -> None:
    found = sharding.plan(block(), torch.empty(64, 64), {"0": ((2, 1), (1, 4))}, Mesh())
    assert found["0"].memory == 64 * 64 * 4 // 8 and found["0.weight"].memory == 64 * 64
    assert found.memory == sum(
        each.memory for name, each in found.items() if name[2:] in ("weight", "bias")
    )
    lines = str(found).splitlines()
    assert lines[0].split() == ["bytes", "memory", "strategy", "otherwise"]
    (line,) = (each for each in lines if each.startswith("0 "))
    (_, own), (strategy, cost) = list(found.alternatives("0").items())[:2]
    assert line.split(maxsplit=3)[3].endswith(f"{cost - own:+} by {strategy}")
    assert lines[-1] == (
        f"a rank holds {found.memory} bytes of parameters, and receives {found.bytes} in a forward "
        "pass"
    )


class OfManyWords(torch.nn.Module):
    """A wide embedding, which is the output's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(50304, 64)
        self.inner = torch.nn.Linear(64, 64)

    def forward(self, words: Any, target: Any) -> Any:
        found = self.inner(self.words(words)) @ self.words.weight.t()
        return torch.nn.functional.cross_entropy(found.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming"])
def test_search_cuts_a_wide_embedding_by_rows(search: str) -> None:
    words = torch.empty(8, 16, dtype=torch.int64, device="meta")
    module = OfManyWords().to("meta")
    found = sharding.plan(module, (words, words), mesh=Mesh(), search=search)
    assert found["words"].strategy == ((8, 1), (1, 1)), found
    assert found["words.weight"].strategy == ((8, 1),), found
    assert found["cross_entropy_loss"].strategy == ((1, 8), (1,)), "no rank has all logits"
