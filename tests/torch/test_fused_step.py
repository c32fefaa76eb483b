"""The step over flat segments: the numbers of torch's own optimizers, and their state."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hvdlite.torch.functions import broadcast_optimizer_state
from hvdlite.torch.optimizer.flat_gradients import FlatGradients
from hvdlite.torch.optimizer.fused_step import FusedStep
from hvdlite.torch.subclass import OptimizerMixin
from tests.ranks import run_ranks

Tensor = torch.Tensor
Make = Callable[..., torch.optim.Optimizer]
SHAPES = ((7, 5), (5,), (3, 4, 3, 3), (1,), (), (40, 30), (30,), (0, 2), (9, 11))
STEPS = 4
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
KINDS: list[tuple[Make, dict[str, Any]]] = [
    (SGD, {}),
    (SGD, {"weight_decay": 0.1}),
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    (SGD, {"maximize": True}),
    *itertools.product(
        (Adam, AdamW),
        (
            {},
            {"amsgrad": True},
            {"weight_decay": 0.1},
            {"weight_decay": 0.1, "amsgrad": True, "maximize": True},
            {"betas": (0.8, 0.95), "eps": 1e-3, "lr": 0.3},
        ),
    ),
]
STATEFUL = [
    (SGD, {"momentum": 0.9, "dampening": 0.3}),
    (Adam, {"amsgrad": True}),
    (AdamW, {"weight_decay": 0.1}),
]
FLAGS = [{}, {"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}]


def random(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


class Training:
    """Parameters, an optimizer, and perhaps a fused step over two segments."""

    def __init__(
        self,
        make: Make,
        options: dict[str, Any],
        fused: bool = True,
        dtype: torch.dtype = torch.float32,
        groups: Sequence[dict[str, Any]] = ({},),
    ) -> None:
        self.dtype = dtype
        self.parameters = [nn.Parameter(value) for value in random(0, dtype)]
        each = -(-len(SHAPES) // len(groups))
        parts = [
            {"params": self.parameters[number * each :][:each], **group}
            for number, group in enumerate(groups)
        ]
        self.optimizer = make(parts, **{"lr": 0.1, **options})
        self.segments = [FlatGradients(part) for part in self.split()] if fused else []
        self.fused: FusedStep | None = None
        if fused:
            self.fused, reason = FusedStep.of(self.optimizer, self.segments)
            assert self.fused is not None, reason

    def split(self) -> list[list[nn.Parameter]]:
        return [self.parameters[4:], self.parameters[:4]]

    def give(self, seed: int, missing: Sequence[int] = ()) -> None:
        for number, gradient in enumerate(random(seed, self.dtype)):
            parameter = self.parameters[number]
            parameter.grad = None if number in missing else gradient
        for flat in self.segments:
            for parameter in flat.parameters:
                if parameter.grad is None:
                    flat.view(parameter).zero_()
                else:
                    flat.adopt(parameter)

    def make_step(self) -> None:
        if self.fused is None:
            self.optimizer.step()
        else:
            self.fused.step()

    def train(self, seeds: Sequence[int] = range(1, 1 + STEPS)) -> Training:
        for seed in seeds:
            self.give(seed)
            self.make_step()
        return self


def check_same(ours: Training, oracle: Training, steps: int = STEPS) -> None:
    """Parameters and state are equal, but for one rounding in a step."""
    for mine, other in zip(ours.parameters, oracle.parameters, strict=True):
        check_close(mine, other, steps)
        state, expected = ours.optimizer.state.get(mine), oracle.optimizer.state.get(other)
        assert (state or {}).keys() == (expected or {}).keys()
        for name, value in (expected or {}).items():
            check_close((state or {})[name], value, steps)


def check_close(mine: Tensor, other: Tensor, steps: int) -> None:
    assert mine.shape == other.shape and mine.dtype == other.dtype
    rounding = torch.finfo(other.dtype).eps
    mine, other = mine.detach().double(), other.detach().double()
    scale = max([1.0, *other.abs().flatten().tolist()])
    torch.testing.assert_close(mine, other, rtol=0, atol=steps * rounding * scale)


def both(
    make: Make, options: dict[str, Any], **more: Any
) -> tuple[Training, Training]:  # ours, and the oracle
    return Training(make, options, **more), Training(make, options, fused=False, **more)


# -- numbers


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize(
    ("make", "options", "dtype"),
    [
        *((*kind, torch.float32) for kind in KINDS),
        *((*kind, dtype) for kind in STATEFUL for dtype in (torch.float64, torch.bfloat16)),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_torch(
    make: Make, options: dict[str, Any], dtype: torch.dtype, flags: dict[str, Any]
) -> None:
    if dtype is torch.bfloat16 and make is SGD and flags.get("fused"):
        pytest.skip("torch's own fused SGD is wrong for 16 bits on the CPU")
    ours, oracle = both(make, {**options, **flags}, dtype=dtype)
    check_same(ours.train(), oracle.train())


@pytest.mark.parametrize(("make", "options"), STATEFUL)
def test_groups_in_one_segment_have_options_of_their_own(
    make: Make, options: dict[str, Any]
) -> None:
    groups = ({"lr": 0.2, "weight_decay": 0.3}, {"lr": 0.01}, {})
    ours, oracle = both(make, options, groups=groups)
    check_same(ours.train(), oracle.train())


@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize(("make", "options"), STATEFUL)
def test_long_segments_are_stepped_in_pieces(
    make: Make, options: dict[str, Any], flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdlite.torch.optimizer.kernels.PIECE", 100)
    ours, oracle = both(make, {**options, **flags})
    check_same(ours.train(), oracle.train())


@pytest.mark.parametrize(("make", "options"), STATEFUL)
def test_a_gradient_scaler_is_obeyed(make: Make, options: dict[str, Any]) -> None:
    """torch.amp.GradScaler sets these attributes of an optimizer made with fused=True."""
    ours, oracle = both(make, {**options, "fused": True})
    for overflow in (0.0, 1.0, 0.0):
        for training in (ours, oracle):
            optimizer: Any = training.optimizer
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(overflow)
            training.train([7])
    check_same(ours, oracle)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # step() is ours
@pytest.mark.parametrize(("make", "options"), STATEFUL)
def test_options_may_change_between_steps(make: Make, options: dict[str, Any]) -> None:
    ours, oracle = both(make, options)
    for training in (ours, oracle):
        schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
        for seed in range(1, 5):
            training.train([seed])
            schedule.step()
            training.optimizer.param_groups[0]["weight_decay"] = 0.05 * seed
    check_same(ours, oracle)
    assert ours.optimizer.param_groups[0]["lr"] == 0.1 / 16


def test_momentum_may_come_later() -> None:
    ours, oracle = both(SGD, {})
    for training in (ours, oracle):
        training.train([1])
        training.optimizer.param_groups[0]["momentum"] = 0.9
        training.train([2, 3])
        training.optimizer.param_groups[0]["momentum"] = 0
        training.train([4])
    check_same(ours, oracle)


@pytest.mark.parametrize("make", [SGD, Adam, AdamW])
def test_the_learning_rate_may_be_a_tensor(make: Make) -> None:
    ours, oracle = both(make, {"lr": torch.tensor(0.1)})
    check_same(ours.train(), oracle.train())


def test_channels_last_parameters_keep_their_format() -> None:
    convolutions = [nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    convolutions[1].load_state_dict(convolutions[0].state_dict())
    images = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    optimizers = [Adam(each.parameters()) for each in convolutions]
    flat = FlatGradients(list(convolutions[0].parameters()))
    step, reason = FusedStep.of(optimizers[0], [flat])
    assert step is not None, reason
    for _ in range(3):
        for each, optimizer in zip(convolutions, optimizers, strict=True):
            optimizer.zero_grad()
            each(images).square().sum().backward()
        for parameter in flat.parameters:
            flat.adopt(parameter)
        step.step()
        optimizers[1].step()
    for mine, other in zip(*(each.parameters() for each in convolutions), strict=True):
        assert mine.stride() == other.stride()
        check_close(mine, other, 3)
        moment = optimizers[0].state[mine]["exp_avg"]
        assert moment.stride() == other.stride()


# -- what is missing, and what was replaced


@pytest.mark.parametrize(("make", "options"), [*STATEFUL, (SGD, {"weight_decay": 0.1})])
def test_a_parameter_without_gradient_does_not_change(make: Make, options: dict[str, Any]) -> None:
    ours, oracle = both(make, options)
    for seed, missing in enumerate([(1, 5), (), (5,), range(len(SHAPES)), (), (2,), ()]):
        before = [parameter.detach().clone() for parameter in ours.parameters]
        for training in (ours, oracle):
            training.give(seed, missing)
            training.make_step()
        for number in missing:
            assert torch.equal(ours.parameters[number], before[number])
        check_same(ours, oracle, 1 + seed)


@pytest.mark.parametrize(("make", "options"), STATEFUL)
def test_a_replaced_gradient_or_parameter_counts(make: Make, options: dict[str, Any]) -> None:
    ours, oracle = both(make, options)
    for seed in range(1, 8):
        for training in (ours, oracle):
            training.give(seed)
            if seed in (1, 3):
                training.parameters[2].grad = torch.ones(SHAPES[2])
            if seed == 5:
                training.parameters[5].data = torch.full(SHAPES[5], 0.5)
            training.make_step()
        check_same(ours, oracle, seed)


@pytest.mark.parametrize(("make", "options"), STATEFUL)
def test_parameters_of_no_segment_are_changed_too(make: Make, options: dict[str, Any]) -> None:
    ours, oracle = both(make, options)
    ours = Training(make, options, fused=False)
    ours.segments = [FlatGradients(ours.parameters[:3])]
    ours.fused, _ = FusedStep.of(ours.optimizer, ours.segments)
    assert ours.fused is not None
    check_same(ours.train(), oracle.train())


def test_a_sparse_gradient_outside_of_the_segments() -> None:
    models = [nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [SGD(each.parameters(), lr=0.1) for each in models]
    flat = FlatGradients(list(models[0][1].parameters()))
    step, reason = FusedStep.of(optimizers[0], [flat])
    assert step is not None, reason
    for model in models:
        model(torch.tensor([1, 4])).square().sum().backward()
    for parameter in flat.parameters:
        flat.adopt(parameter)
    step.step()
    optimizers[1].step()
    for mine, other in zip(*(each.parameters() for each in models), strict=True):
        check_close(mine, other, 1)


def test_backward_through_values_of_before_the_step_is_an_error() -> None:
    ours = Training(SGD, {})
    loss = ours.parameters[0].square().sum()
    ours.train([1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- state


@pytest.mark.parametrize(("make", "options"), STATEFUL)
def test_state_goes_to_a_plain_optimizer_and_back(make: Make, options: dict[str, Any]) -> None:
    ours, oracle = both(make, options)
    ours.train(), oracle.train()
    plain, again = Training(make, options, fused=False), Training(make, options)
    plain.optimizer.load_state_dict(saved(ours))
    again.optimizer.load_state_dict(saved(oracle))
    again.train([])
    for training in (plain, again):
        for mine, other in zip(training.parameters, oracle.parameters, strict=True):
            mine.data.copy_(other)
        training.train([11, 12])
    oracle.train([11, 12])
    check_same(plain, oracle, STEPS + 2)
    check_same(again, oracle, STEPS + 2)


def saved(training: Training) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(training.optimizer.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


@pytest.mark.parametrize(("make", "options"), STATEFUL)
def test_state_that_is_loaded_or_replaced_holds(make: Make, options: dict[str, Any]) -> None:
    ours, oracle = both(make, options)
    for training in (ours, oracle):
        early = copy.deepcopy(training.train([1, 2]).optimizer.state_dict())
        training.train([3])
        training.optimizer.load_state_dict(early)
        training.train([4])
        for state in training.optimizer.state.values():
            for name, value in state.items():
                state[name] = value + 1
        training.train([5])
        for number in (3, 4):  # one parameter has been changed more often than the others
            state = training.optimizer.state[training.parameters[number]]
            if "step" in state:
                state["step"].add_(2)
        training.train([6])
    check_same(ours, oracle, 6)


@pytest.mark.parametrize(("make", "options"), STATEFUL)
def test_state_whose_memory_has_moved_holds(make: Make, options: dict[str, Any]) -> None:
    """A tensor that stays the same object goes to another device and back, and changes there."""
    ours, oracle = both(make, options)
    for training in (ours, oracle):
        training.train([1, 2])
        for place, parameter in enumerate(training.parameters):
            for value in training.optimizer.state[parameter].values():
                value.data = value.data.clone() + place % 2
        training.train([3, 4])
    check_same(ours, oracle, 4)
    ours_saved = saved(ours)["state"]
    for number, state in saved(oracle)["state"].items():
        for name, value in state.items():
            check_close(ours_saved[number][name], value, 4)


@pytest.mark.parametrize(("make", "options"), STATEFUL)
def test_an_optimizer_that_has_stepped_goes_on(make: Make, options: dict[str, Any]) -> None:
    ours, oracle = (Training(make, options, fused=False).train([1, 2]) for _ in range(2))
    ours.segments = [FlatGradients(part) for part in ours.split()]
    ours.fused, _ = FusedStep.of(ours.optimizer, ours.segments)
    assert ours.fused is not None
    check_same(ours.train([3, 4]), oracle.train([3, 4]))


def test_state_and_parameters_are_views_of_few_buffers() -> None:
    ours = Training(AdamW, {}).train()
    for name in ("exp_avg", "exp_avg_sq"):
        states = [ours.optimizer.state[parameter][name] for parameter in ours.parameters]
        assert len({each.untyped_storage().data_ptr() for each in states}) == 2
    assert len({each.untyped_storage().data_ptr() for each in ours.parameters}) == 2


@pytest.mark.timeout(120)
def test_the_state_of_the_root_is_taken_over() -> None:
    import hvdlite.torch as hvd

    trainings = [Training(Adam, {}) for _ in range(2)]
    trainings[0].train()

    def main(rank: int) -> None:
        mine = trainings[rank]
        broadcast_optimizer_state(mine.optimizer, root_rank=0)
        hvd.broadcast_parameters(
            [(f"p{n}", parameter) for n, parameter in enumerate(mine.parameters)], root_rank=0
        )
        mine.train([7, 8])

    run_ranks(2, main)
    check_same(trainings[1], Training(Adam, {}, fused=False).train([1, 2, 3, 4, 7, 8]), 6)


# -- what cannot be


class _Own(SGD):
    """A user's optimizer that changes nothing."""


class _OtherStep(Adam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class _Distributed(OptimizerMixin):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def reason_of(optimizer: torch.optim.Optimizer, *parts: Sequence[Tensor]) -> str:
    before = [p.data_ptr() for part in parts for p in part]
    step, reason = FusedStep.of(optimizer, [FlatGradients(part) for part in parts])
    assert (step is None) == bool(reason)
    if reason:
        assert [p.data_ptr() for part in parts for p in part] == before
    return reason


def pair(**options: Any) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, **options)), nn.Parameter(torch.ones(3, **options))]


def test_classes_of_the_same_step_are_fused() -> None:
    parameters = pair()
    assert reason_of(_Own(parameters), parameters) == ""
    wrapped = type("SGD", (_Distributed, SGD), {})
    assert reason_of(wrapped(parameters), parameters) == ""


@pytest.mark.parametrize("make", [_OtherStep, torch.optim.RMSprop, torch.optim.NAdam])
def test_other_optimizers_are_refused(make: Make) -> None:
    parameters = pair()
    assert make.__name__ in reason_of(make(parameters), parameters)


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_that_forbid_it_are_named(option: str) -> None:
    parameters = pair()
    assert f"group 0 of the optimizer has {option}=True" in reason_of(
        Adam(parameters, **{option: True}), parameters
    )


def test_parameters_that_forbid_it_are_named() -> None:
    one, two = pair()
    optimizer = SGD([one, two])
    assert "no segment has two" in reason_of(optimizer, [one], [two])
    assert "shape (2,) is in a segment, but not in the optimizer" in reason_of(optimizer, pair())
    assert "in two segments" in reason_of(optimizer, [one, two], [one])
    numbers = pair(dtype=torch.complex64)
    assert "real numbers" in reason_of(SGD(numbers), numbers)
    two.data = one.data[1:].expand(3)
    assert "shapes (2,) and (3,) share memory" in reason_of(optimizer, [one, two])


def test_segments_can_be_made_anew() -> None:
    ours, oracle = both(AdamW, {})
    ours.train([1, 2])
    ours.segments = [FlatGradients(ours.parameters)]
    ours.fused, reason = FusedStep.of(ours.optimizer, ours.segments)
    assert ours.fused is not None, reason
    check_same(ours.train([3]), oracle.train([1, 2, 3]))
