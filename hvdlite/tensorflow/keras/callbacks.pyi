"""A second name of hvdlite.keras.callbacks, for editors and type checkers; see module_aliases.py."""

from hvdlite.keras.callbacks import *
