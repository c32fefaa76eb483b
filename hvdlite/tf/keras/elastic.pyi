"""A second name of hvdlite.keras.elastic, for editors and type checkers; see module_aliases.py."""

from hvdlite.keras.elastic import *
