"""A second name of hvdlite.tf.elastic, for editors and type checkers; see module_aliases.py."""

from hvdlite.tf.elastic import *
