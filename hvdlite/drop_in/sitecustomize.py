"""Put into PYTHONPATH by hvdlite.as_horovod: makes `import horovod` find hvdlite in this process.

Python runs the first sitecustomize that it finds, so this one runs the next one itself.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_here = os.path.dirname(os.path.abspath(__file__))


def _install() -> None:
    try:
        from hvdlite.as_horovod import install
    except ImportError:  # another Python, without hvdlite
        return
    install()


def _run_next() -> None:
    others = [path for path in sys.path if os.path.abspath(path) != _here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_install()
_run_next()
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _here]
