"""`python -m rockmate`: the command line."""

import sys

from rockmate.command import main

if __name__ == "__main__":
    sys.exit(main())
