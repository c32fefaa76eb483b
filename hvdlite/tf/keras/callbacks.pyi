"""A second name of hvdlite.keras.callbacks, for editors and type checkers; see hvdlite/names.py."""

from hvdlite.keras.callbacks import *
