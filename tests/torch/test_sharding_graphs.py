"""Random networks with random strategies on ranks as threads equal one process, in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from hvdlite.common.layouts.operators import candidates
from hvdlite.torch import sharding
from tests.torch.sharded_ranks import Mesh, check_against_one_process
from tests.torch.sharding_graphs import RandomGraph

RANKS = [2, 3, 4, 6, 8]
ALWAYS, ALL = 24, 500

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.filterwarnings("ignore:.*runs on whole inputs")
@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[] if n < ALWAYS else [pytest.mark.soak]) for n in range(ALL)],
)
def test_random_graphs(seed: int) -> None:
    chooser = random.Random(seed)
    ranks = chooser.choice(RANKS)
    model = RandomGraph(seed)
    x = torch.randn(model.shape, generator=torch.Generator().manual_seed(seed))
    found = sharding.plan(model, x, mesh=Mesh((ranks,))).found
    assert found is not None
    operators = [each for each in found.operators if each.lengths]
    strategies = {}
    for operator in chooser.sample(operators, min(5, len(operators))):
        cuts = chooser.choice(candidates(operator, ranks, chooser.random() < 0.5))
        strategies[operator.name] = operator.strategy(cuts)
    options: dict[str, Any] = {"fully_use_devices": chooser.random() < 0.7}
    options["search"] = chooser.choice(["propagation"] * 3 + ["dynamic_programming"])
    check_against_one_process(model, [x], strategies, ranks, tolerance=1e-9, **options)
