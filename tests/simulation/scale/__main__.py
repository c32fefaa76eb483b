"""Time what thousands of ranks take: see large_job.py."""

import sys

from tests.simulation.scale.large_job import main

if __name__ == "__main__":
    sys.exit(main())
