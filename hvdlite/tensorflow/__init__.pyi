"""A second name of hvdlite.tf, for editors and type checkers; see hvdlite/names.py."""

from hvdlite.tf import *
