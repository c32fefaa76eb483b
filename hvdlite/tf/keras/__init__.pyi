"""A second name of hvdlite.keras, for editors and type checkers; see module_aliases.py."""

from hvdlite.common.runtime.public_names import *
from hvdlite.keras import *
