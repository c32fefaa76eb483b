"""A second name of hvdlite.tf, for editors and type checkers; see module_aliases.py."""

from hvdlite.common.runtime.public_names import *
from hvdlite.tf import *
from hvdlite.tf.mpi_ops import *
