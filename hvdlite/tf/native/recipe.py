"""The recipe to compile `ops.cc`, with the flags of the TensorFlow that is installed."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from hvdlite.common.collectives.native.build import Recipe


def recipe() -> Recipe:
    """Return the recipe of the compiled operations for this TensorFlow."""
    return Recipe(
        source=Path(__file__).with_name("ops.cc"),
        folder="tf",
        name=f"ops-{tf.version.VERSION}",
        flags=("-O2", *tf.sysconfig.get_compile_flags()),
        libraries=tuple(tf.sysconfig.get_link_flags()),
        depends_on=(tf.version.GIT_VERSION,),
        remark=f"for TensorFlow {tf.version.VERSION}, once (some 10 seconds of CPU time)",
        module="hvdlite.tf.build",
    )
