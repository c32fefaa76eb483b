"""Try the compiled operations of TensorFlow: `python -m hvdlite.tf.native.trial`.

Exits with 0 where they work; the last line of its output says where they are from, or why they do
not work. `hvdlite-run --check-build` runs it.
"""

from __future__ import annotations

import os
import sys

import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.collectives.native.cache import BuildError


def main() -> int:
    """Run a graph with a collective on one rank; return 0 if its result is right."""
    os.environ["HVDLITE_TF_NATIVE"] = "on"  # otherwise Python takes its place
    hvd.init()
    values = tf.range(1000, dtype=tf.float32)
    try:
        result = tf.function(hvd.allreduce)(values)
    except BuildError as error:
        print(error)
        return 1
    if (result.numpy() == values.numpy()).all():
        print(f"compiled on this machine, for TensorFlow {tf.version.VERSION}")
        return 0
    print("the compiled operations give a wrong result")
    return 1


if __name__ == "__main__":
    sys.exit(main())
