"""`python -m hvdlite.launcher` is `hvdlite-run`."""

import sys

from hvdlite.launcher.cli import main

sys.exit(main())
