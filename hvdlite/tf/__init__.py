"""hvdlite for TensorFlow."""

from hvdlite.tf.mpi_ops import *
