"""`python -m adaptersync_tools.cli`, for where the script `adaptersync` is not on the path."""

import sys

from adaptersync_tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
