"""A second name of hvdlite.keras, for editors and type checkers; see module_aliases.py."""

from hvdlite.keras import *
