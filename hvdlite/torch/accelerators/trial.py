"""Says which library of torch reduces tensors on the accelerator of this machine.

Run as a module, by --check-build. It exits with 0 if there is one; its last line says which.
"""

from __future__ import annotations

import sys

import torch

from hvdlite.torch.accelerators.c10d import of_accelerator
from hvdlite.torch.device_modules import accelerator_kind


def main() -> int:
    """Print a line; return the exit status."""
    kind = accelerator_kind()
    if kind is None:
        print(f"torch {torch.__version__} sees no accelerator")
        return 1
    library = of_accelerator()
    count = torch.get_device_module(kind).device_count()
    if library is None:
        print(f"{count} of {kind}, and torch has no process group for them")
        return 1
    print(f"{library.name.partition(':')[2].upper()} for {count} of {kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
