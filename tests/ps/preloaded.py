"""What processes of a cluster need, imported once, before they are forked."""

from __future__ import annotations

import torch

import hvdlite.torch.ps  # noqa: F401 - for those that are forked from this process
from tests.ps import digits

torch.set_num_threads(1)  # Threads do not survive a fork.
digits.data()
# The first optimizer imports half of PyTorch.
torch.optim.SGD(digits.network().parameters(), lr=1.0)
