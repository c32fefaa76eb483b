"""Says whether hvdlite reduces tensors of TensorFlow on the GPUs of this machine, and by what.

Run as a module, by --check-build. It exits with 0 if it does; its last line says what was found.
"""

from __future__ import annotations

import sys

import tensorflow as tf

from hvdlite.common.base.errors import ConfigError
from hvdlite.tf.accelerators.library import FAILURES, load_libraries, obstacle


def main() -> int:
    """Print a line; return the exit status."""
    if reason := obstacle():
        print(reason)
        return 1
    try:
        nccl, _ = load_libraries()
    except (*FAILURES, ConfigError) as error:
        print(error)
        return 1
    count = len(tf.config.list_physical_devices("GPU"))
    print(f"NCCL {nccl.version_text} ({nccl.path}) for {count} of gpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
