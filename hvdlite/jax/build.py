"""Compile what makes collectives in programs of JAX faster, before a job needs it.

python -m hvdlite.jax.build
"""

from __future__ import annotations

import sys

from hvdlite.common.collectives.native import build
from hvdlite.jax.native.library import recipe

if __name__ == "__main__":
    sys.exit(build.main(recipe(), __doc__))
