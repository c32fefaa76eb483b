"""A second name of hvdlite.common.runtime.basics, for editors; see module_aliases.py."""

from hvdlite.common.runtime.basics import *
