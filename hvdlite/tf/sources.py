"""Variables, and other sources of gradients, as TensorFlow has them."""

from __future__ import annotations

import tensorflow as tf

from hvdlite.common.gradients.variables import Sources

SOURCES = Sources(tf.Variable)

plain = SOURCES.plain
is_variable = SOURCES.is_variable
key_of = SOURCES.key_of
