"""Compile what makes collectives in TensorFlow's graphs faster, before a job needs it.

python -m hvdlite.tf.build
"""

from __future__ import annotations

import argparse
import sys
import time

from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.tf.native.loader import recipe


def main() -> int:
    """Compile; 0 where the operations are there."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    start = time.monotonic()
    try:
        path = recipe().compile_once(try_again=True)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path} ({time.monotonic() - start:.1f} seconds)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
