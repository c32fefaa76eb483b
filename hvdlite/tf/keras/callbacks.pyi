"""A second name of hvdlite.keras.callbacks, for editors; see module_aliases.py."""

from hvdlite.keras.callbacks import *
