"""torch.distributed.pipelining: two stages, four microbatches."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.process_group import models
from tests.parallel.process_group.features import feature

MICROBATCHES = 4


def losses(schedule: str, group: dist.ProcessGroup | None, ranks: list[int]) -> list[float]:
    """The loss of each microbatch, on the last stage."""
    from torch.distributed import pipelining

    model, stage = models.make_model(), dist.get_rank(group)
    parts = [model[:2], model[2:]]
    inputs, targets = models.make_batch(0)
    example = inputs.chunk(MICROBATCHES)[0]
    sizes = [example, parts[0](example)]
    pipe_stage = pipelining.PipelineStage(
        parts[stage], stage, 2, torch.device("cpu"), (sizes[stage],), group=group
    )
    kind = getattr(pipelining, schedule)
    run = kind(pipe_stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    found: list[torch.Tensor] = []
    if stage == 0:
        run.step(inputs)
    else:
        run.step(target=targets, losses=found)
    gradient = next(parts[stage].parameters()).grad
    assert gradient is not None and gradient.abs().sum() > 0
    alone = models.make_model()
    (sum(_losses_alone(alone)) / MICROBATCHES).backward()  # type: ignore[union-attr]
    theirs = next([alone[:2], alone[2:]][stage].parameters()).grad
    assert theirs is not None
    if "scale_grads" not in inspect.signature(kind).parameters:  # Older releases add them up.
        theirs = theirs * MICROBATCHES
    torch.testing.assert_close(gradient, theirs)
    return [loss.item() for loss in found]


def _losses_alone(model: nn.Module) -> list[torch.Tensor]:
    batch = models.make_batch(0)
    pieces = zip(batch[0].chunk(MICROBATCHES), batch[1].chunk(MICROBATCHES), strict=True)
    return [models.loss_of(model, piece) for piece in pieces]


@feature(2)
def pipelines() -> None:
    expected = [loss.item() for loss in _losses_alone(models.make_model())]
    for schedule in ("ScheduleGPipe", "Schedule1F1B"):
        found = losses(schedule, None, [0, 1])
        if dist.get_rank() == 1:
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@feature(4)
def two_pipelines_of_two_stages() -> None:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mine = dist.get_rank() // 2
    found = losses("Schedule1F1B", pairs[mine], [2 * mine, 2 * mine + 1])
    expected = [loss.item() for loss in _losses_alone(models.make_model())]
    if dist.get_rank(pairs[mine]) == 1:
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    dist.barrier()
