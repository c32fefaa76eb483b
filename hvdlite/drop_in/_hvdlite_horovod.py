"""Answer to the name horovod: written into an environment by hvdlite.as_horovod --install.

Imported at every start of Python there, so it imports hvdlite only once horovod is asked for.
``python -m hvdlite.as_horovod --uninstall`` and ``pip uninstall horovod`` remove it.
"""

import sys


class Starter:
    """Gives way to the finder of hvdlite at the first module of Horovod."""

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        """Return the spec of a module of Horovod; None for others, and if hvdlite is gone."""
        if fullname.partition(".")[0] != "horovod":
            return None
        try:
            from hvdlite.as_horovod import install
        except ImportError:  # it has been uninstalled, and this has not
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        return install().find_spec(fullname, path, target)


sys.meta_path.insert(0, Starter())
