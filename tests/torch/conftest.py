"""What all tests of the PyTorch adapter share."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # the ranks are threads already
