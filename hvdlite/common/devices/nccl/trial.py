"""Says whether hvdlite's own binding finds NCCL and the CUDA runtime, and which.

Run as a module, by --check-build. It exits with 0 if it does; its last line says what was found.
"""

from __future__ import annotations

import sys

from hvdlite.common.devices.nccl.binding import Nccl
from hvdlite.common.devices.nccl.cudart import CudaRuntime
from hvdlite.common.plain.config import Config


def main() -> int:
    """Print a line; return the exit status."""
    config = Config.from_environ()
    try:
        nccl = Nccl(config.nccl_library)
        cuda = CudaRuntime(config.cudart_library)
    except (OSError, RuntimeError, ValueError) as error:
        print(error)
        return 1
    text = f"NCCL {nccl.version_text} ({nccl.path}) for {cuda.device_count()} of cuda"
    print(f"{text}, with HVDLITE_DEVICES=nccl")
    return 0 if cuda.device_count() else 1


if __name__ == "__main__":
    sys.exit(main())
