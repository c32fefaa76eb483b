"""What processes of a cluster need, imported once, before they are forked."""

from __future__ import annotations

import torch

import hvdlite.torch.ps  # noqa: F401 - for those that are forked from this process
from tests import lean  # noqa: F401 - the first optimizer would import half of PyTorch
from tests.ps import digits

torch.set_num_threads(1)  # Threads do not survive a fork.
digits.data()
torch.optim.SGD(digits.network().parameters(), lr=1.0)
