"""`python -m kvtool`."""

import sys

from kvtool.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
