"""A second name of hvdlite.common.base.errors, for editors; see module_aliases.py."""

from hvdlite.common.base.errors import *
