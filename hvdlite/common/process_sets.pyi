"""A second name of hvdlite.common.runtime.process_sets, for editors; see module_aliases.py."""

from hvdlite.common.runtime.process_sets import *
