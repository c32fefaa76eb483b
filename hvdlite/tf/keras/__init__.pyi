"""A second name of hvdlite.keras, for editors and type checkers; see hvdlite/names.py."""

from hvdlite.keras import *
