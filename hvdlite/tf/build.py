"""Compile what makes collectives in TensorFlow's graphs faster, before a job needs it.

python -m hvdlite.tf.build
"""

from __future__ import annotations

import sys

from hvdlite.common.collectives.native import build
from hvdlite.tf.native.loader import recipe

if __name__ == "__main__":
    sys.exit(build.main(recipe(), __doc__))
