"""A second name of hvdlite.common.api.horovod_util, for editors; see module_aliases.py."""

from hvdlite.common.api.horovod_util import *
