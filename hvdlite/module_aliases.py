"""Second names of modules: `hvdlite.tensorflow` is `hvdlite.tf`, the very same module object.

Imported with hvdlite itself, by every user: it is cheap, and imports no framework. Editors and type
checkers, which do not run this, read the ``.pyi`` files that stand at the second names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from hvdlite.missing_names import reason_for, refuse_import

if TYPE_CHECKING:
    from importlib.abc import Loader
else:  # which is slow to import, and gives nothing
    Loader = object

# By second names: where a module has its file, with all that is below it.
OWN_NAMES = {
    "hvdlite.tensorflow": "hvdlite.tf",
    "hvdlite.tf.keras": "hvdlite.keras",
    # Users of Horovod import these four from its package "common".
    "hvdlite.common.basics": "hvdlite.common.runtime.basics",
    "hvdlite.common.exceptions": "hvdlite.common.base.errors",
    "hvdlite.common.process_sets": "hvdlite.common.runtime.process_sets",
    "hvdlite.common.util": "hvdlite.common.api.horovod_util",
}


def own_name(name: str) -> str:
    """Return the module's own name, which is `name` itself unless that is a second name."""
    for second, own in OWN_NAMES.items():
        if name == second or name.startswith(second + "."):
            return own_name(own + name.removeprefix(second))
    return name


def exists(name: str) -> bool:
    """Whether there is a module of that name; imports the packages above it, but not the module."""
    if name in sys.modules:
        return True
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except ModuleNotFoundError as error:
        if name.startswith(f"{error.name}."):  # its package is not there
            return False
        raise  # the package needs something that is not there


class AliasFinder:
    """Finds the modules of hvdlite under their second names, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that loads the module under its own name."""
        if fullname.startswith("hvdlite.") and reason_for(fullname):
            refuse_import(fullname)
            return None
        own = own_name(fullname)
        return ModuleSpec(fullname, SameModule(own)) if own != fullname and exists(own) else None


class SameModule(Loader):
    """Loads a module under a second name."""

    def __init__(self, own_name: str) -> None:
        self.own_name = own_name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the very module object that has the other name."""
        module = importlib.import_module(self.own_name)
        self._spec = module.__spec__
        return module

    def get_code(self, fullname: str) -> CodeType | None:
        """Return what ``python -m`` runs."""
        from importlib.util import find_spec

        spec = find_spec(self.own_name)
        loader: Any = None if spec is None else spec.loader
        code: CodeType | None = loader.get_code(self.own_name)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed a second time; the module keeps its own name."""
        module.__spec__ = self._spec


def install() -> None:
    """Answer to the second names in this process."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(
            0, AliasFinder()
        )  # others would find a second copy in the package's folder
