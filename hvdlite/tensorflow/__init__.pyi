"""A second name of hvdlite.tf, for editors and type checkers; see module_aliases.py."""

from hvdlite.tf import *
