"""A worker of the tests that trains with PyTorch in world after world, and prints its weights."""

from __future__ import annotations

import tests.lean  # noqa: F401

# isort: split
import hashlib

import torch

import hvdlite.torch as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime import lifecycle, worlds
from tests.elastic.fake_driver import STOP
from tests.elastic.worker_allreduce import NUMBER, say


def main() -> None:
    """Train until the driver stops the job; newcomers receive the weights of rank 0."""
    torch.manual_seed(NUMBER)
    torch.set_num_threads(1)
    hvd.init()
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(32, 32), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    if lifecycle.is_waiting():
        worlds.next_world(0)
    kind = None
    while kind != STOP:
        world = worlds.current_world()
        assert world is not None
        try:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer.load_state_dict(optimizer.state_dict())  # Drops what the last world left.
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            kind, step = None, 0
            while kind is None:
                optimizer.zero_grad()
                model(torch.randn(8, 32)).square().mean().backward()
                optimizer.step()
                if step % 10 == 0:
                    flat = torch.cat([each.detach().flatten() for each in model.parameters()])
                    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
                    say(epoch=world.epoch, step=step, digest=digest)
                step, kind = step + 1, worlds.check()
        except HorovodInternalError as error:
            assert not error.job_goes_on, error
            kind = None
        if kind != STOP:
            worlds.next_world(world.epoch)


if __name__ == "__main__":
    main()
