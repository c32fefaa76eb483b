"""hvdlite: data-parallel training with Horovod's API, installed by pip alone.

These let scripts, editors and packages that know Horovod find it here: `as_horovod` answers to the
name horovod in one job, `horovod_install` and `drop_in` in an environment; `module_aliases` has
second names of modules, whose ``.pyi`` files (`tensorflow/`, and some in `common/`) are for editors
only; `missing_names` says what Horovod has and hvdlite lacks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hvdlite import missing_names, module_aliases

if TYPE_CHECKING:
    from hvdlite.launcher.function import run

__all__ = ["__version__", "run"]
__version__: str

# In a checkout that is not installed, launcher/ lies beside this package, not in it.
_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_checkout, "launcher", "cli.py")):
    __path__.append(_checkout)

module_aliases.install()


def __getattr__(name: str) -> Any:
    """Load what is asked for: importing hvdlite alone must stay cheap."""
    if name == "run":
        from hvdlite.launcher.function import run

        return run
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("hvdlite")
        except PackageNotFoundError:  # a checkout that is not installed
            return "0+unknown"
    raise missing_names.attribute_error(__name__, name)
