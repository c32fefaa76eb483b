"""Segments while the job changes: ranks join, parameters come and go, and something fails."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.compression import Compressor
from tests.ranks import run_ranks
from tests.torch.scaled import Watch, distributed, small, step

pytestmark = pytest.mark.timeout(240)
SIZE = 2


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def wrap(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(inner, model.named_parameters(), **options)


def train(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def texts_of(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught]


# -- ranks that join


@pytest.mark.parametrize(
    ("batches", "segmentation"),
    [
        *((each, "auto") for each in [(11, 10), (10, 13), (0, 4), (4, 0)]),
        *((each, "size:50,50") for each in [(11, 10), (0, 4)]),
    ],
)
def test_ranks_join_and_go_on_in_the_next_epoch(
    batches: tuple[int, int], segmentation: str
) -> None:
    models = [layers() for _ in range(SIZE)]

    def main(rank: int) -> list[int]:
        watch, last = Watch(), []
        optimizer = wrap(models[rank], segmentation=segmentation)
        for epoch in range(4):
            for _ in range(batches[rank] if epoch % 2 == 0 else 7):
                train(models[rank], optimizer)
            hvd.join()
        watch.take()
        for _ in range(2):
            train(models[rank], optimizer)
            last.append(len(watch.take()))
        return last

    counts = run_ranks(SIZE, main)
    assert counts[0] == counts[1]
    assert max(counts[0]) <= 8


def test_auto_settles_although_ranks_join_in_every_epoch() -> None:
    models = [layers() for _ in range(SIZE)]

    def main(rank: int) -> None:
        optimizer = wrap(models[rank], segmentation="auto")
        frozen = False
        while not frozen:
            for _ in range(9 + rank):
                train(models[rank], optimizer)
            hvd.join()
            # Ranks hear of it at the same step, but rank 1 may make one more than rank 0.
            frozen = bool(
                hvd.allreduce(
                    torch.tensor(optimizer._exchange.segment_schedule.auto.frozen), op=hvd.Min
                )
            )

    run_ranks(SIZE, main)


def test_what_one_rank_did_alone_before_it_joined_is_forgotten() -> None:
    models = [layers() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model, watch = models[rank], Watch()
        frozen = [*model[:2].parameters()]
        for parameter in frozen:
            parameter.requires_grad_(False)
        optimizer = wrap(model, segmentation="size:50,50")
        if rank == 0:
            train(model, optimizer)
        hvd.join()
        for parameter in frozen:
            parameter.requires_grad_(True)
        watch.take()
        for _ in range(3):
            train(model, optimizer)
        assert sorted(map(len, watch.take()))[-2:] == [4, 4]

    run_ranks(SIZE, main)


class Reversed(nn.Module):
    """Its gradients are ready in the order of their definition."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.extra = (nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, with_extra: bool) -> torch.Tensor:
        y = self.a(self.b(self.c(x)))
        return (self.extra(y) if with_extra else y).sum()  # type: ignore[no-any-return]


def test_the_order_of_readiness_is_learned_after_a_join_too() -> None:
    models = [Reversed() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model, watch = models[rank], Watch()
        optimizer = wrap(model, segmentation="size:25,25,50")

        def batch(with_extra: bool) -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 4), with_extra).backward()
            optimizer.step()

        for _ in range(3):
            batch(False)
        for _ in range(1 - rank):
            batch(True)  # one more, with a part that was not used before
        hvd.join()
        for _ in range(4):
            watch.take()
            batch(True)
        runs = sorted(map(sorted, watch.take()))
        assert runs == [["a.weight"], ["b.weight", "c.weight"], ["extra.weight"]]

    run_ranks(SIZE, main)


@pytest.mark.parametrize("gone", [0, 1])
def test_auto_settles_in_a_new_job_with_the_same_optimizer(gone: int) -> None:
    models = [layers() for _ in range(SIZE + gone)]
    optimizers: list[Any] = [None] * len(models)

    def first(rank: int) -> None:
        optimizers[rank] = wrap(models[rank], segmentation="auto")
        for _ in range(4):
            train(models[rank], optimizers[rank])

    def second(rank: int) -> None:
        number, frozen = rank + gone, False
        while not frozen:
            train(models[number], optimizers[number])
            auto = optimizers[number]._exchange.segment_schedule.auto
            frozen = auto is not None and auto.frozen

    run_ranks(len(models), first)
    run_ranks(SIZE, second)


# -- parameters that come and go


@pytest.mark.parametrize("size", [1, 2])
def test_fewer_gradients_than_percentages_are_left(size: int) -> None:
    models = [layers() for _ in range(size)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = wrap(model, segmentation="size:80,20", gradient_as_bucket_view=True)
        for number in range(6):
            if number == 2:
                for parameter in [*model.parameters()][1:]:
                    parameter.requires_grad_(False)
                    parameter.grad = None
            train(model, optimizer)

    run_ranks(size, main)


def test_one_rank_alone_settles_with_all_that_ever_comes() -> None:
    model, other = Reversed(), Reversed()

    def main(rank: int) -> None:
        optimizer = wrap(model, gradient_as_bucket_view=True)
        oracle = torch.optim.SGD(other.parameters(), lr=0.1)
        flats = []
        for number in range(6):
            for each, net in ((optimizer, model), (oracle, other)):
                each.zero_grad()
                net(torch.ones(2, 4), number % 2 == 0).backward()
                each.step()
            flats.append(optimizer._exchange.segment_schedule.flat)
        assert flats[1:] == flats[:-1]

    run_ranks(1, main)
    for mine, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


# -- gradient scaling


@pytest.mark.parametrize("segmentation", [None, "size:50,50", "size:100"])
@pytest.mark.parametrize("bad_step", [0, 2])
def test_all_ranks_skip_the_same_steps(segmentation: str | None, bad_step: int) -> None:
    models = [layers() for _ in range(SIZE)]

    def main(rank: int) -> float:
        optimizer = wrap(models[rank], segmentation=segmentation)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(4):
            optimizer.zero_grad()
            factor = float("inf") if (rank, number) == (1, bad_step) else 1.0
            scaler.scale(models[rank](torch.ones(2, 4)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            if number == 1:
                hvd.join()
        return scaler.get_scale()

    assert run_ranks(SIZE, main) == [2.0, 2.0]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("segmentation", [None, "size:100"])
def test_scaled_gradients_that_one_rank_does_not_have(segmentation: str | None) -> None:
    models = [Branches() for _ in range(SIZE)]

    def main(rank: int) -> None:
        optimizer = wrap(models[rank], segmentation=segmentation)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(4):
            optimizer.zero_grad()
            loss = models[rank](torch.ones(2, 4), number < 2 or rank == 0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    run_ranks(SIZE, main)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.abs().max() < 10  # nothing was left scaled


@pytest.mark.parametrize("segmentation", [None, "size:50,50"])
def test_a_closure_after_a_backward_of_its_own(segmentation: str | None) -> None:
    models = [layers() for _ in range(SIZE)]

    def main(rank: int) -> None:
        optimizer = wrap(models[rank], segmentation=segmentation)

        def closure() -> torch.Tensor:
            loss = models[rank](torch.ones(2, 4)).sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.zero_grad()
            closure()
            optimizer.step(closure)

    run_ranks(SIZE, main)


def test_a_process_set_that_is_not_registered_needs_nothing_on_one_rank() -> None:
    model = layers()

    def main(rank: int) -> None:
        train(model, wrap(model, process_set=hvd.ProcessSet([0])))

    run_ranks(1, main)


@pytest.mark.parametrize("segmentation", ["size:50,50", "auto"])
def test_a_step_before_the_first_backward_teaches_nothing(segmentation: str) -> None:
    models = [layers() for _ in range(SIZE)]

    def main(rank: int) -> None:
        watch = Watch()
        optimizer = wrap(models[rank], segmentation=segmentation)
        optimizer.step()
        for _ in range(3):
            train(models[rank], optimizer)
            assert sorted(map(len, watch.take())) == ([4, 4] if segmentation != "auto" else [8])
        assert optimizer._exchange.segment_schedule._arranged
        assert (optimizer._exchange.segment_schedule.auto is None) == (segmentation != "auto")

    run_ranks(SIZE, main)


def test_parameters_that_thaw_and_freeze_are_cut_with_the_others() -> None:
    models = [layers(8) for _ in range(SIZE)]

    def main(rank: int) -> None:
        model, watch = models[rank], Watch()
        thawing = [*model[:7].parameters()]
        for parameter in thawing:
            parameter.requires_grad_(False)
        optimizer = wrap(model, segmentation="size:80,20")
        counts = []
        for number in range(9):
            for parameter in thawing if number in (3, 6) else []:
                parameter.requires_grad_(number == 3)
                parameter.grad = None
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            in_backward = len(optimizer._exchange._in_flight)
            optimizer.step()
            counts.append(len(watch.take()))
            if number in (2, 5, 8):
                assert in_backward == counts[-1]  # nothing waits for what does not come
        assert (counts[2], counts[5], counts[8]) == (1, 2, 1)

    run_ranks(SIZE, main)


def test_parameters_that_are_added_are_cut_with_the_others() -> None:
    models = [layers(2) for _ in range(SIZE)]

    def main(rank: int) -> None:
        model, watch = models[rank], Watch()
        inner = torch.optim.SGD(model[1].parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, segmentation="size:50,50")
        for number in range(6):
            if number == 3:
                optimizer.add_param_group({"params": [*model[0].parameters()]})
            train(model, optimizer)
            runs = watch.take()
        assert sorted(map(len, runs)) == [2, 2]

    run_ranks(SIZE, main)


class Branches(nn.Module):
    """A part that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = self.always(x)
        return (self.sometimes(y) if both else y).sum()  # type: ignore[no-any-return]


def test_auto_settles_where_one_rank_never_has_some_gradient() -> None:
    models = [Branches() for _ in range(SIZE)]

    def main(rank: int) -> None:
        optimizer = wrap(models[rank], segmentation="auto")
        frozen = False
        while not frozen:
            optimizer.zero_grad()
            models[rank](torch.ones(2, 4), rank == 0).backward()
            optimizer.step()
            frozen = optimizer._exchange.segment_schedule.auto.frozen

    run_ranks(SIZE, main)


@pytest.mark.parametrize("as_views", [False, True])
def test_gradients_that_were_dropped_before_the_step_leave_segments_alike(as_views: bool) -> None:
    models = [Branches() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = wrap(model, segmentation="size:100", gradient_as_bucket_view=as_views)
        for number in range(6):
            model(torch.ones(2, 4), number < 4 or rank == 0).backward()
            if number in (2, 3):
                model.zero_grad()
                with pytest.raises(RuntimeError, match="was set to None after it was sent"):
                    optimizer.step()
            else:
                optimizer.step()
            model.zero_grad()

    run_ranks(SIZE, main)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_sparse_gradients_that_travel_as_dense_ones_live_in_segments() -> None:
    def of(views: bool) -> list[nn.Module]:
        models: list[nn.Module] = []
        for _ in range(SIZE):
            torch.manual_seed(0)
            models.append(nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)))

        def main(rank: int) -> None:
            optimizer = wrap(models[rank], sparse_as_dense=True, gradient_as_bucket_view=views)
            for _ in range(3):
                optimizer.zero_grad()
                models[rank](torch.tensor([1, 2 + rank])).square().sum().backward()
                optimizer.step()

        run_ranks(SIZE, main)
        return models

    for plain, viewed in zip(of(False)[0].parameters(), of(True)[1].parameters(), strict=True):
        torch.testing.assert_close(plain, viewed)


# -- what goes wrong


class Halving(Compressor):
    """Not one of ours."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor.to(context)


@pytest.mark.parametrize("segmentation", ["size:100", "auto"])
def test_what_is_refused_on_one_rank_is_said_there(segmentation: str) -> None:
    models = [Branches() for _ in range(SIZE)]

    def main(rank: int) -> None:
        class Refusing(Halving):
            @staticmethod
            def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
                if rank == 1:
                    raise ValueError("of this rank alone")
                return Halving.compress(tensor)

        optimizer = wrap(models[rank], segmentation=segmentation, compression=Refusing)
        models[rank](torch.ones(2, 4), rank == 0).backward()  # rank 1 sends in step()
        with pytest.raises(ValueError if rank else hvd.HorovodInternalError):
            optimizer.step()

    run_ranks(SIZE, main)


@pytest.mark.parametrize("segmentation", [None, "size:50,50", "auto"])
@pytest.mark.parametrize("bad_step", [0, 4])
def test_an_error_of_one_rank_does_not_hold_up_the_others(
    segmentation: str | None, bad_step: int
) -> None:
    models = [small() for _ in range(SIZE)]

    def main(rank: int) -> list[int]:
        optimizer, failed = distributed(models[rank], segmentation=segmentation), []
        for number in range(8):
            optimizer.zero_grad()
            models[rank](1.0).backward()
            if rank == 1 and number == bad_step:
                for parameter in models[rank].named.values():
                    assert parameter.grad is not None
                    parameter.grad.mul_(2)
            try:
                optimizer.step()
            except RuntimeError:
                failed.append(number)
        return failed

    assert run_ranks(SIZE, main) == [[], [bad_step]]


@pytest.mark.parametrize("segmentation", [None, "size:50,50", "auto"])
@pytest.mark.parametrize("bad_step", [0, 4])
def test_a_result_that_one_rank_cannot_take_does_not_hold_up_the_others(
    segmentation: str | None, bad_step: int
) -> None:
    models = [small() for _ in range(SIZE)]
    calls = [0] * SIZE

    def main(rank: int) -> list[int]:
        class Spoiling(Halving):
            @staticmethod
            def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
                calls[rank] += 1
                if rank == 1 and calls[rank] == 1 + 4 * bad_step:
                    raise ValueError("of this rank alone")
                return Halving.decompress(tensor, context)

        failed = []
        optimizer = distributed(models[rank], segmentation=segmentation, compression=Spoiling)
        for number in range(8):
            optimizer.zero_grad()
            models[rank](1.0).backward()
            try:
                optimizer.step()
            except ValueError:
                failed.append(number)
        return failed

    assert run_ranks(SIZE, main) == [[], [bad_step]]


class OfOurs(hvd.Compression.fp16):  # type: ignore[name-defined, misc]
    """One may do anything in it."""


@pytest.mark.parametrize("compression", [Halving, OfOurs])
def test_what_compresses_gradient_by_gradient_cannot_live_in_segments(compression: Any) -> None:
    models = [small() for _ in range(SIZE)]
    turn = threading.Lock()

    def main(rank: int) -> None:
        with pytest.raises(ValueError, match="gradient by gradient"):
            distributed(models[rank], compression=compression, gradient_as_bucket_view=True)
        with turn, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            distributed(models[rank], compression=compression, fuse_all_optimizer_ops=True)
        assert "fuse_all_optimizer_ops has no effect" in texts_of(caught)[0]

    run_ranks(SIZE, main)


@pytest.mark.parametrize("size", [1, 2])
def test_adasum_has_no_segments(size: int) -> None:
    models = [small() for _ in range(size)]

    def main(rank: int) -> None:
        with pytest.raises(ValueError, match="need op=Average or Sum, not Adasum"):
            distributed(models[rank], op=hvd.Adasum, gradient_as_bucket_view=True)

    run_ranks(size, main)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("size", [1, 2])
def test_who_asks_for_fused_steps_is_told_where_there_are_none(
    size: int, kind: Any, closure: bool
) -> None:
    models = [layers() for _ in range(size)]
    turns = threading.Semaphore(0)
    turns.release()

    def main(rank: int) -> bool:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters(), lr=0.1), model.named_parameters(), fuse_all_optimizer_ops=True
        )

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = model(torch.ones(2, 4)).sum()
            value.backward()
            return value

        for _ in range(3):
            if closure:
                optimizer.step(loss)
            else:
                train(model, optimizer)
        return optimizer._fused is not None

    fusable = kind is torch.optim.SGD and not closure
    with warnings.catch_warnings(record=True) as caught:  # of all threads
        warnings.simplefilter("always")
        assert run_ranks(size, main) == [fusable] * size
    told = [text for text in texts_of(caught) if "fuse_all_optimizer_ops has no effect" in text]
    assert bool(told) != fusable


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", [{}, {"segmentation": "size:100"}, {"op": hvd.Min}], ids=str)
def test_what_is_set_after_the_first_step_is_refused(size: int, options: dict[str, Any]) -> None:
    models = [small() for _ in range(size)]

    def main(rank: int) -> None:
        step(models[rank], distributed(models[rank], **options), rank)
        with pytest.raises(ValueError, match="reduced already"):
            hvd.set_split_strategy_by_size([80, 20])

    run_ranks(size, main)


@pytest.mark.parametrize("options", [{"groups": 1}, {"op": hvd.Max}, {"op": hvd.Adasum}], ids=str)
def test_a_setting_without_effect_is_told(options: dict[str, Any]) -> None:
    models = [small() for _ in range(SIZE)]

    def main(rank: int) -> None:
        step(models[rank], distributed(models[rank], **options), rank)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(SIZE, main, config=Config(segmentation="size:50,50"))
    assert any("segmentation size:50,50 has no effect" in text for text in texts_of(caught))


# -- several optimizers


def test_auto_looks_at_its_own_gradients_alone() -> None:
    models = [(layers(), layers()) for _ in range(SIZE)]

    def main(rank: int) -> None:
        seen: list[list[float]] = [[], []]
        optimizers = []
        for number, model in enumerate(models[rank]):
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizers.append(hvd.DistributedOptimizer(inner, segmentation="auto"))
            train(model, optimizers[number])
        for number, optimizer in enumerate(optimizers):
            tuner = optimizer._exchange.segment_schedule.auto._tuner
            if tuner is not None:
                tuner.observe = lambda iteration, number=number: seen[number].extend(
                    start for _, start, _ in iteration.segments
                )
        for _ in range(3):
            for model, optimizer in zip(models[rank], optimizers, strict=True):
                train(model, optimizer)
            hvd.broadcast_parameters(models[rank][0].state_dict(), 0)
        if rank == 0:
            assert [len(starts) for starts in seen] == [3, 3]
            assert min(map(min, seen)) >= 0

    run_ranks(SIZE, main)


@pytest.mark.parametrize("as_views", [False, True])
def test_a_process_set_has_segments_of_its_own(as_views: bool) -> None:
    models = [layers() for _ in range(3)]

    def main(rank: int) -> None:
        some = hvd.add_process_set([0, 2])
        watch = Watch()
        optimizer = wrap(
            models[rank],
            segmentation="auto",
            process_set=some,
            gradient_as_bucket_view=as_views,
        )
        for _ in range(5):
            train(models[rank], optimizer)
            assert len(watch.take()) == (1 if rank != 1 else 0)

    run_ranks(3, main)
